"""Host links: numbered tensors arrive once, in order and bit for bit, whatever breaks between."""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from rollpacker.pipeline.links.host_receiver import HostReceiver
from rollpacker.pipeline.links.host_route import (
    GREETING,
    Patience,
    decode_routes,
    encode_routes,
)
from rollpacker.pipeline.links.host_sender import HostSender, _Connection
from rollpacker.pipeline.links.link import Border, LinkLost
from rollpacker.pipeline.links.wire import (
    ALIVE,
    ANSWER,
    DELIVERED,
    bytes_of,
    packed_header,
)
from rollpacker.workers.listener import connect
from tests.own_sockets import bound_addresses
from tests.trainer.pipeline.relay import Relay

FORWARD = Border(stages=(0, 1), peer=1)
BACKWARD = Border(stages=(1, 0), peer=0)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No test leaves a thread or a descriptor."""
    gc.collect()
    threads, descriptors = link_threads(), os.listdir("/proc/self/fd")
    yield
    gc.collect()
    wait_until(lambda: link_threads() <= threads)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= len(descriptors))


def link_threads() -> set[threading.Thread]:
    """The process has others, of whatever ran here before."""
    names = ("sends to", "receives from", "hears")
    return {thread for thread in threading.enumerate() if thread.name.startswith(names)}


def wait_until(holds: Callable[[], bool], within_s: float = 60.0) -> None:
    until = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < until, "it did not become true"
        time.sleep(0.01)


class Arrivals:
    """What arrived at one end, and how the link was lost."""

    def __init__(self) -> None:
        self.all: list[tuple[int, Tensor]] = []
        self.lost: list[LinkLost] = []

    def receiver(self, border: Border = FORWARD, **others: object) -> HostReceiver:
        put = lambda number, tensor: self.all.append((number, tensor))  # noqa: E731
        return HostReceiver(border, on_arrival=put, on_lost=self.lost.append, **others)  # type: ignore[arg-type]


def tensor(random_: random.Random) -> Tensor:
    dtype = random_.choice([torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
    shape = [random_.randrange(6) for _ in range(random_.randrange(3))] + [random_.randrange(4000)]
    made = torch.Generator().manual_seed(random_.getrandbits(32))
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=made).to(dtype)


def equal_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def test_every_message_arrives_once_and_in_order_while_connections_are_killed() -> None:
    random_ = random.Random(1)
    ends: list[tuple[Arrivals, HostReceiver, Relay, HostSender]] = []
    for border in (FORWARD, BACKWARD):
        arrivals = Arrivals()
        receiver = arrivals.receiver(border)
        relay = Relay(receiver.routes[0].host, receiver.routes[0].port)
        routes = [dataclasses.replace(receiver.routes[0], port=relay.port)]
        sender = HostSender(border, routes, on_lost=arrivals.lost.append, max_connections=3)
        ends.append((arrivals, receiver, relay, sender))
    sent = [[tensor(random_) for _ in range(1000)] for _ in ends]
    kill_at = set(random_.sample(range(10, 990), 25))
    for number in range(1000):
        for (arrivals, _, relay, sender), messages in zip(ends, sent, strict=True):
            sender.send(number, messages[number])
            if number in kill_at:  # with some messages on their way, whichever they are
                wait_until(lambda seen=arrivals, past=number - 9: len(seen.all) >= past)
                before = relay.num_killed
                while relay.num_killed == before:
                    relay.kill(random_)
                    time.sleep(0.001)
    for (arrivals, _, relay, _), messages in zip(ends, sent, strict=True):
        wait_until(lambda seen=arrivals: len(seen.all) >= 1000)
        assert [number for number, _ in arrivals.all] == list(range(1000))
        assert all(map(equal_bits, (one for _, one in arrivals.all), messages))
        assert relay.num_killed == 25
        assert arrivals.lost == []
    for _, receiver, relay, sender in ends:
        wait_until(lambda one=sender: len(one._times) == 1000)
        assert not sender._messages  # it keeps what is on its way, no more
        assert [one.number for one in receiver.times()] == list(range(1000))
        assert sorted(one.number for one in sender.times()) == list(range(1000))
        for end in (sender, receiver, relay):
            end.close()


def test_times_are_in_order_on_each_clock() -> None:
    arrivals = Arrivals()
    receiver = arrivals.receiver()
    sender = HostSender(FORWARD, receiver.routes, on_lost=arrivals.lost.append)
    sender.send(0, torch.zeros(3, 5))
    wait_until(lambda: len(sender._times) == 1)
    (send,), (arrival,) = sender.times(), receiver.times()
    assert send.posted_s <= send.started_s <= send.acknowledged_s
    assert send.posted_s == arrival.posted_s <= arrival.arrived_s  # one process, so one clock
    assert (send.num_bytes, arrival.num_bytes) == (60, 60)
    assert sender.times() == receiver.times() == []
    sender.close()
    receiver.close()


def test_tensors_of_all_kinds_come_through() -> None:
    arrivals = Arrivals()
    receiver = arrivals.receiver()
    sender = HostSender(FORWARD, receiver.routes, on_lost=arrivals.lost.append)
    sent = [
        torch.tensor(3.5),
        torch.zeros(0, 4),
        torch.arange(12.0).view(3, 4).T,
        torch.tensor([float("nan"), -0.0]),
        torch.ones(2, 3, requires_grad=True) * 2,
    ]
    for number, one in enumerate(sent):
        sender.send(number, one)
    wait_until(lambda: len(arrivals.all) == len(sent))
    assert all(
        equal_bits(one, other.detach().contiguous())
        for (_, one), other in zip(arrivals.all, sent, strict=True)
    )
    with pytest.raises(AssertionError, match="complex64"):
        sender.send(len(sent), torch.zeros(1, dtype=torch.complex64))
    sender.close()
    receiver.close()


def test_a_second_route_takes_over_when_the_first_is_cut() -> None:
    arrivals = Arrivals()
    receiver = arrivals.receiver(hosts=("127.0.0.1", "127.0.0.2"))
    first, second = receiver.routes
    relay = Relay(first.host, first.port)
    routes = decode_routes(encode_routes([dataclasses.replace(first, port=relay.port), second]))
    patience = Patience(silence_s=0.5, alive_s=0.1)
    sender = HostSender(FORWARD, routes, on_lost=arrivals.lost.append, patience=patience)
    message = torch.arange(300_000.0)
    for number in range(5):
        sender.send(number, message)
    wait_until(lambda: len(arrivals.all) == 5)
    relay.passes.clear()
    for number in range(5, 15):
        sender.send(number, message)
    wait_until(lambda: len(arrivals.all) == 15)
    assert [number for number, _ in arrivals.all] == list(range(15))
    assert all(torch.equal(one, message) for _, one in arrivals.all)
    assert arrivals.lost == []
    for end in (sender, receiver, relay):
        end.close()


class RawSender:
    """One connection, by hand."""

    def __init__(self, receiver: HostReceiver, place: int, greeting: int = 0) -> None:
        route = receiver.routes[0]
        said = GREETING.pack(place, greeting)
        self.socket = connect(route.host, route.port, route.token, said).released()
        self.socket.settimeout(60)

    def answer(self) -> tuple[int, int]:
        said = b""
        while len(said) < ANSWER.size:
            more = self.socket.recv(ANSWER.size - len(said))
            assert more, "it hung up"
            said += more
        kind, number = ANSWER.unpack(said)
        return kind, number

    def answers_until(self, kind: int) -> list[tuple[int, int]]:
        found = [self.answer()]
        while found[-1][0] != kind:
            found.append(self.answer())
        return found

    def is_hung_up(self) -> bool:
        try:
            return self.socket.recv(1) == b""
        except ConnectionError:
            return True


def packed(number: int, one: Tensor) -> bytes:
    data = bytes(bytes_of(one))
    return packed_header(number, one, 0.0, zlib.crc32(data)) + data


def test_a_sender_is_assured_while_its_message_is_slow_or_waits() -> None:
    arrivals = Arrivals()
    receiver = arrivals.receiver(patience=Patience(alive_s=0.02))
    first, second = RawSender(receiver, 0), RawSender(receiver, 1)
    assert first.answer() == second.answer() == (DELIVERED, 0)
    half = len(packed(1, torch.ones(100))) // 2
    first.socket.sendall(packed(1, torch.ones(100))[:half])
    assert [first.answer()[0] for _ in range(3)] == [ALIVE] * 3  # half of it is here
    first.socket.sendall(packed(1, torch.ones(100))[half:])
    assert [first.answer()[0] for _ in range(10)] == [ALIVE] * 10  # message 0 is not
    assert arrivals.all == []
    second.socket.sendall(packed(0, torch.zeros(5)))
    assert second.answers_until(DELIVERED)[-1] in ((DELIVERED, 1), (DELIVERED, 2))
    assert first.answers_until(DELIVERED)[-1] == (DELIVERED, 2)
    assert [number for number, _ in arrivals.all] == [0, 1]
    second.socket.sendall(packed(0, torch.zeros(5)))  # again, as after a loss
    assert second.answers_until(DELIVERED)[-1] == (DELIVERED, 2)
    assert len(arrivals.all) == 2
    for one in (first, second):
        one.socket.close()
    receiver.close()


def test_what_comes_damaged_is_dropped_with_its_connection() -> None:
    arrivals = Arrivals()
    receiver = arrivals.receiver(max_bytes=1000)
    good = packed(0, torch.ones(100))
    too_long = packed(0, torch.ones(1000))
    bit_flipped = good[:-1] + bytes([good[-1] ^ 1])
    shape_flipped = good[:45] + bytes([good[45] ^ 1]) + good[46:]
    for greeting, damaged in enumerate([too_long, bit_flipped, shape_flipped, bytes(200)]):
        raw = RawSender(receiver, 0, greeting)
        assert raw.answer() == (DELIVERED, 0)
        raw.socket.sendall(damaged)
        assert raw.is_hung_up()
        raw.socket.close()
    assert arrivals.all == []
    raw = RawSender(receiver, 0, 4)
    assert raw.answer() == (DELIVERED, 0)  # nobody listens to a message before this
    raw.socket.sendall(good)
    assert raw.answers_until(DELIVERED)[-1] == (DELIVERED, 1)
    # A connection that was made before this one, and comes late, is turned away; a later one
    # takes its place.
    late = RawSender(receiver, 0, 3)
    assert late.is_hung_up()
    later = RawSender(receiver, 0, 5)
    assert later.answer() == (DELIVERED, 1)
    assert raw.is_hung_up()
    for one in (raw, late, later):
        one.socket.close()
    receiver.close()


def test_closing_during_traffic_ends_everything() -> None:
    for first_closed in range(2):
        arrivals = Arrivals()
        receiver = arrivals.receiver()
        sender = HostSender(FORWARD, receiver.routes, on_lost=arrivals.lost.append)
        for number in range(50):
            sender.send(number, torch.zeros(1 << 18))
        wait_until(lambda seen=arrivals: len(seen.all) > 3)
        ends = [sender, receiver]
        ends.pop(first_closed).close()
        ends[0].close()
        ends[0].close()
        num_arrived = len(arrivals.all)
        assert [number for number, _ in arrivals.all] == list(range(num_arrived))
        assert all("was closed there" in str(error) for error in arrivals.lost)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_receiver_that_cannot_take_a_message_is_lost() -> None:
    arrivals = Arrivals()

    def refuse(number: int, _: Tensor) -> None:
        raise RuntimeError(f"no room for {number}")

    receiver = HostReceiver(FORWARD, on_arrival=refuse, on_lost=arrivals.lost.append)
    sender = HostSender(FORWARD, receiver.routes, on_lost=arrivals.lost.append)
    sender.send(0, torch.zeros(1))
    wait_until(lambda: len(arrivals.lost) >= 1)
    assert "receiving failed here: RuntimeError('no room for 0')" in str(arrivals.lost[0])
    sender.close()
    receiver.close()


def test_each_end_hears_that_the_other_was_closed() -> None:
    heard_by_sender: list[LinkLost] = []
    arrivals = Arrivals()
    receiver = arrivals.receiver()
    sender = HostSender(FORWARD, receiver.routes, on_lost=heard_by_sender.append)
    sender.send(0, torch.zeros(1))
    wait_until(lambda: not sender._messages)
    receiver.close()
    sender.send(1, torch.zeros(1))
    wait_until(lambda: len(heard_by_sender) == 1)
    with pytest.raises(LinkLost, match=r"from stage 0 to stage 1.*process 1 .*127\.0\.0\.1"):
        sender.send(2, torch.zeros(1))
    sender.close()
    assert arrivals.lost == []

    receiver = arrivals.receiver(BACKWARD)
    sender = HostSender(BACKWARD, receiver.routes, on_lost=heard_by_sender.append)
    sender.send(0, torch.zeros(1))
    wait_until(lambda: not sender._messages)
    sender.close()
    wait_until(lambda: len(arrivals.lost) == 1)
    assert "from stage 1 to stage 0" in str(arrivals.lost[0])
    receiver.close()
    assert len(heard_by_sender) == len(arrivals.lost) == 1


def test_a_connection_is_idle_as_soon_as_its_message_is_acknowledged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own thread may see that later. Closed meanwhile, the sender still says goodbye."""
    arrivals, may_go_on = Arrivals(), threading.Event()
    receiver = arrivals.receiver()
    sender = HostSender(FORWARD, receiver.routes, on_lost=arrivals.lost.append)
    carry, wake = _Connection.carry, sender._wake

    def carry_and_wait(*arguments: Any, **others: Any) -> None:
        carry(*arguments, **others)
        may_go_on.wait()

    def wake_and_go_on() -> None:
        wake()
        may_go_on.set()

    monkeypatch.setattr(_Connection, "carry", carry_and_wait)
    monkeypatch.setattr(sender, "_wake", wake_and_go_on)
    sender.send(0, torch.zeros(1))
    wait_until(lambda: not sender._messages)
    sender.close()
    wait_until(lambda: len(arrivals.lost) == 1)
    assert "it was closed there" in str(arrivals.lost[0])
    receiver.close()


def test_a_wrong_token_is_refused() -> None:
    heard: list[LinkLost] = []
    arrivals = Arrivals()
    receiver = arrivals.receiver()
    wrong = [dataclasses.replace(receiver.routes[0], token=bytes(32))]
    impatient = Patience(give_up_s=0.3, connect_s=20.0)  # each attempt gets its answer
    sender = HostSender(FORWARD, wrong, on_lost=heard.append, patience=impatient)
    sender.send(0, torch.zeros(1))
    wait_until(lambda: len(heard) == 1)
    assert "turned away: is the token right?" in str(heard[0])
    assert arrivals.all == []
    sender.close()
    receiver.close()


def test_a_peer_that_never_comes_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    arrivals, heard = Arrivals(), list[LinkLost]()
    impatient = Patience(give_up_s=0.3)
    receiver = arrivals.receiver(patience=impatient)
    nowhere = [dataclasses.replace(receiver.routes[0], port=port)]
    sender = HostSender(FORWARD, nowhere, on_lost=heard.append, patience=impatient)
    wait_until(lambda: len(heard) == 1 and len(arrivals.lost) == 1)
    assert f"127.0.0.1:{port}" in str(heard[0])
    assert f"127.0.0.1:{receiver.routes[0].port}" in str(arrivals.lost[0])
    for error in (heard[0], arrivals.lost[0]):
        assert "the link from stage 0 to stage 1, with process 1 of the trainer" in str(error)
    sender.close()
    receiver.close()


def test_it_listens_at_the_given_addresses_alone() -> None:
    arrivals = Arrivals()
    others = bound_addresses()  # of whatever ran in this process before
    receiver = arrivals.receiver(hosts=("127.0.0.3",))
    port = receiver.routes[0].port
    found = {host for host, at in bound_addresses() - others if at == port}
    receiver.close()
    assert found == {"127.0.0.3"}
    with pytest.raises(ValueError, match=r"'0\.0\.0\.0' stands for all of them"):
        arrivals.receiver(hosts=("127.0.0.1", "0.0.0.0"))


def test_there_are_as_many_connections_as_messages_on_their_way() -> None:
    """They are held up at the receiver, as on a link of long latency."""
    arrivals = Arrivals()
    may_arrive = threading.Event()

    def arrive(number: int, one: Tensor) -> None:
        may_arrive.wait()
        arrivals.all.append((number, one))

    receiver = HostReceiver(FORWARD, on_arrival=arrive, on_lost=arrivals.lost.append)
    sender = HostSender(FORWARD, receiver.routes, on_lost=arrivals.lost.append, max_connections=5)
    assert len(sender._threads) == 1
    for number in range(8):
        sender.send(number, torch.zeros(1))
        assert len(sender._threads) == min(number + 1, 5)
    may_arrive.set()
    wait_until(lambda: len(arrivals.all) == 8 and not sender._messages)
    for number in range(8, 12):  # one at a time is what one connection carries
        sender.send(number, torch.zeros(1))
        wait_until(lambda: not sender._messages)
    assert len(sender._threads) == 5
    assert [number for number, _ in arrivals.all] == list(range(12))
    sender.close()
    receiver.close()
