"""Weights that are published to several hosts: each shard leaves the trainer's host once."""

from __future__ import annotations

import dataclasses
import threading
import time
from itertools import pairwise

import pytest
import torch

from rollpacker.weights.between_hosts import port as weight_port
from rollpacker.weights.between_hosts.arriving import Shipment, shards_of
from rollpacker.weights.between_hosts.port import PortAddress, WeightPort, Written, take
from rollpacker.weights.between_hosts.spread import OwnHost, Spread
from rollpacker.weights.buffer import (
    ALIGNMENT,
    BufferLayout,
    StaleWeightsError,
    WeightBuffer,
    WeightReader,
    WeightSource,
    read,
)
from rollpacker.workers.hosts.remote_host import RemoteHost
from tests.own_sockets import bound_addresses
from tests.remote.agents import Net
from tests.remote.weight_links import LinkedHost

SIZE = 6 << 20
SLOW = 12 << 20
"""Bytes a second: half a second for all of them."""


def written(version: int = 1, size: int = SIZE) -> WeightBuffer:
    buffer = WeightBuffer.create([("a", torch.zeros(size // 4)), ("b", torch.zeros(3))])
    write(buffer, version)
    return buffer


def write(buffer: WeightBuffer, version: int) -> None:
    with buffer.writing(version) as tensors:
        for tensor in tensors.values():
            tensor.copy_(torch.arange(tensor.numel()) * version)


def is_whole(source: WeightSource, size: int = SIZE) -> bool:
    with WeightReader().reading(source) as tensors:
        return torch.equal(tensors["a"], torch.arange(size // 4) * float(source.version))


def found_at(spread: Spread, host: LinkedHost, source: WeightSource) -> WeightSource:
    """What the host has of it, without any of it being brought."""

    def call(*_: object) -> None:
        raise AssertionError("it was not published here")

    return spread.bring(source, host, call, host.address)


class World:
    """So many hosts beside a trainer's, of which there may be several."""

    def __init__(self, num_hosts: int, num_writers: int = 1, bytes_per_s: float | None = None):
        self.spread = Spread()
        self.writers = [LinkedHost(f"t{n}", bytes_per_s) for n in range(num_writers)]
        for writer in self.writers:
            self.spread.add(writer.name, writer)
        self.hosts = [LinkedHost(f"h{n}") for n in range(num_hosts)]
        self.buffers = [written() for _ in self.writers]
        self.ended: list[dict[str, Exception] | Exception] = []

    def sources(self, version: int = 1) -> list[WeightSource]:
        return [
            WeightSource(version=version, layout=_on(buffer.layout, writer.name))
            for buffer, writer in zip(self.buffers, self.writers, strict=True)
        ]

    def publish(self, version: int = 1) -> dict[str, Exception]:
        return self.spread.publish(self.sources(version), self.hosts)

    def begin(self) -> threading.Thread:
        def work() -> None:
            try:
                self.ended.append(self.publish())
            except Exception as error:
                self.ended.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread

    def crossed(self) -> list[int]:
        return [writer.link.num_bytes for writer in self.writers if writer.link is not None]

    def wait_until_crossed(self, size: int) -> None:
        until = time.monotonic() + 30
        while sum(self.crossed()) < size:
            assert time.monotonic() < until
            time.sleep(0.005)

    def have(self, version: int = 1) -> list[str]:
        source = self.sources(version)[0]
        return [host.name for host in self.hosts if is_whole(found_at(self.spread, host, source))]


def _on(layout: BufferLayout, host: str) -> BufferLayout:
    return dataclasses.replace(layout, host=host)


@pytest.mark.parametrize("num_hosts, num_writers", [(1, 1), (2, 1), (4, 1), (1, 2), (3, 2)])
def test_what_leaves_the_trainers_hosts_is_one_model(num_hosts, num_writers):
    world = World(num_hosts, num_writers)
    for version in (1, 2):
        for buffer in world.buffers:
            write(buffer, version)
        before = sum(world.crossed())
        assert world.publish(version) == {}
        assert len(world.have(version)) == num_hosts
        crossed = sum(world.crossed()) - before
        assert SIZE <= crossed < 1.01 * SIZE
    each = world.crossed()
    assert max(each) < 1.01 * min(each), "each of them sends its share"
    assert world.publish(2) == {} and world.crossed() == each, "they have it already"


def test_a_model_smaller_than_the_hosts_are_many():
    world = World(5)
    world.buffers = [WeightBuffer.create([("a", torch.zeros(1))])]
    with world.buffers[0].writing(1) as tensors:
        tensors["a"].fill_(7)
    assert world.publish() == {}
    for host in world.hosts:
        there = found_at(world.spread, host, world.sources()[0])
        with WeightReader().reading(there) as tensors:
            assert tensors["a"].item() == 7


@pytest.mark.parametrize("dead", [(1,), (0, 1), (3,), (0, 1, 2)])
def test_hosts_that_die_amid_it_cost_the_others_their_shards_alone(dead):
    world = World(4, bytes_per_s=SLOW)
    thread = world.begin()
    world.wait_until_crossed(SIZE // 3)
    for number in dead:
        world.hosts[number].die()
    thread.join(200)
    (failed,) = world.ended
    assert sorted(failed) == sorted(world.hosts[number].name for number in dead)
    living = [host for number, host in enumerate(world.hosts) if number not in dead]
    world.hosts = living
    assert len(world.have()) == len(living)
    assert sum(world.crossed()) < (1.05 + len(dead) / 4) * SIZE


def test_a_host_that_falls_silent_amid_it_does_not_hold_up_the_others(monkeypatch):
    monkeypatch.setattr(weight_port, "SILENT_S", 1.0)
    monkeypatch.setattr(weight_port, "BEAT_S", 0.2)
    world = World(3, bytes_per_s=SLOW)
    thread = world.begin()
    world.wait_until_crossed(SIZE // 3)
    silent = world.hosts.pop(2)
    silent.link.is_held.set()
    thread.join(200)
    assert world.ended == [{}], "it takes what comes, and nobody hears of it"
    assert world.have() == ["h0", "h1"]
    assert sum(world.crossed()) < (1.05 + 1 / 3) * SIZE


def test_a_host_that_does_not_know_of_it_is_passed_over(monkeypatch):
    monkeypatch.setattr(weight_port, "UNKNOWN_S", 0.5)
    world = World(3)
    stranger, called = world.hosts[0], world.hosts[0]._call

    def call(method: str, *arguments: object) -> object:
        if method == "take":
            raise OSError("it was never told")
        return called(method, *arguments)

    stranger._call = call
    assert list(world.publish()) == ["h0"]
    del world.hosts[0]
    assert world.have() == ["h1", "h2"]
    assert sum(world.crossed()) < 1.01 * SIZE


def test_a_link_that_is_cut_for_a_while_costs_that_while():
    world = World(3, bytes_per_s=SLOW)
    thread = world.begin()
    world.wait_until_crossed(SIZE // 3)
    world.writers[0].link.is_cut.set()
    time.sleep(1.5)
    assert thread.is_alive()
    world.writers[0].link.is_cut.clear()
    thread.join(200)
    assert world.ended == [{}] and len(world.have()) == 3
    assert sum(world.crossed()) < 1.1 * SIZE, "what was there was not taken again"


def test_a_trainers_host_that_stays_away(monkeypatch):
    monkeypatch.setattr("rollpacker.weights.between_hosts.spread.PATIENCE_S", 1.0)
    world = World(3, bytes_per_s=SLOW)
    thread = world.begin()
    world.wait_until_crossed(SIZE // 3)
    world.writers[0].link.is_cut.set()
    thread.join(200)
    (failed,) = world.ended
    assert sorted(failed) == ["h0", "h1", "h2"]
    assert all(isinstance(error, OSError) for error in failed.values())
    for host in world.hosts:
        there = WeightBuffer(host.weights.copy(world.sources()[0].layout))
        with pytest.raises(StaleWeightsError), there.reading(1):
            pass


@pytest.mark.parametrize("num_writers", [1, 2])
def test_weights_that_change_amid_it_are_whole_nowhere(num_writers):
    world = World(2, num_writers, bytes_per_s=SLOW)
    thread = world.begin()
    world.wait_until_crossed(SIZE // 3)
    write(world.buffers[-1], 2)  # of several, one is ahead
    thread.join(200)
    assert [type(one) for one in world.ended] == [StaleWeightsError]
    for host in world.hosts:
        there = WeightBuffer(host.weights.copy(world.sources()[0].layout))
        with pytest.raises(StaleWeightsError), there.reading(1):
            pass
    write(world.buffers[0], 2)
    assert world.publish(2) == {} and len(world.have(2)) == 2


# -- the port --------------------------------------------------------------------------------------


def takes(port: PortAddress, version: int, size: int = 8) -> bytes:
    into = bytearray(size)
    take(port, version, memoryview(into), 0, lambda _: None)
    return bytes(into)


def test_a_port_gives_nothing_without_its_token_nor_another_version(monkeypatch):
    monkeypatch.setattr(weight_port, "UNKNOWN_S", 0.2)
    buffer, port = written(), WeightPort("127.0.0.1")
    head = read(buffer.layout, 0, ALIGNMENT)
    port.stream(3, Written(buffer.layout, head))
    assert takes(port.address, 3) == head[:8]
    with pytest.raises(OSError):
        takes(PortAddress("127.0.0.1", port.address.port, bytes(32)), 3)
    with pytest.raises(OSError, match="does not have"):
        takes(port.address, 4)
    with pytest.raises(StaleWeightsError):
        takes(port.address, 2)
    write(buffer, 2)
    with pytest.raises(StaleWeightsError):
        takes(port.address, 3)
    assert port.address.token.hex() not in repr(port.address)
    assert repr(port.address.token) not in repr(port.address)
    port.close()
    until = time.monotonic() + 60
    while port.address.port in {at for _, at in bound_addresses()}:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_shards_are_all_of_it_and_of_one_size():
    layout = written().layout
    ports = tuple(PortAddress(str(n), n, b"") for n in range(7))
    shipment = Shipment(
        number=1, layout=layout, head=b"", sources=ports[:2], takers=ports[2:], patience_s=1.0
    )
    shards = shards_of(shipment)
    assert shards[0].start == ALIGNMENT and shards[-1].end == layout.size_bytes - ALIGNMENT
    assert all(one.end == other.start for one, other in pairwise(shards))
    sizes = [shard.end - shard.start for shard in shards]
    assert max(sizes) - min(sizes) <= 1
    of_each = {(shard.first, shard.source.port) for shard in shards}
    assert of_each == {(taker, source) for taker in range(5) for source in range(2)}


# -- behind agents ---------------------------------------------------------------------------------


def test_hosts_behind_agents_have_it_before_their_engines_ask():
    net, spread, buffer = Net(lost=0.2), Spread(), written()
    own = OwnHost(spread)
    hosts = [
        RemoteHost(name, net.connect, spread, heartbeat_s=5.0, address="127.0.0.1")
        for name in ("a", "b", "c")
    ]
    for host in hosts:
        host.facts()
    for version in (1, 2):
        write(buffer, version)
        source = buffer.layout.source(version)
        assert spread.publish([source], [own, *hosts]) == {}
        net.calls.clear()
        for host in hosts:
            assert is_whole(host.weights(source))
        assert "take" not in net.calls
    for one in (own, *hosts):
        one.close()


def test_a_host_that_is_lost_amid_it_gets_them_later(monkeypatch):
    monkeypatch.setattr("rollpacker.weights.between_hosts.spread.PORT_S", 1.0)
    nets, spread, buffer = [Net(), Net()], Spread(), written()
    own = OwnHost(spread)
    a, b = (
        RemoteHost(name, net.connect, spread, heartbeat_s=3.0, address="127.0.0.1")
        for name, net in zip("ab", nets, strict=True)
    )
    a.facts(), b.facts()
    nets[1].is_cut.set()
    assert list(spread.publish([buffer.layout.source(1)], [a, b])) == ["b"]
    assert is_whole(a.weights(buffer.layout.source(1)))
    nets[1].is_cut.clear()
    b.facts()
    assert is_whole(b.weights(buffer.layout.source(1)))
    for one in (own, a, b):
        one.close()
    for net in nets:
        for agent in net.agents:
            agent.close()


def test_a_version_that_comes_while_a_host_looks_for_it_is_found_as_that_version():
    world = World(1)
    (trainer,), (host,) = world.writers, world.hosts
    assert not world.publish()
    write(world.buffers[0], 2)
    (source,) = world.sources(2)
    agent, call = trainer.agent()
    looked, come = threading.Event(), threading.Event()

    def slowly(method: str, *arguments: object) -> object:
        said = call(method, *arguments)
        if not looked.is_set():
            looked.set()
            come.wait()
        return said

    trainer.agent = lambda: (agent, slowly)
    found: list[WeightSource] = []
    looking = threading.Thread(target=lambda: found.append(found_at(world.spread, host, source)))
    looking.start()
    looked.wait()
    assert not world.publish(2)
    come.set()
    looking.join()
    assert [one.version for one in found] == [2]
    assert is_whole(found[0])
