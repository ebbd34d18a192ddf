"""A host behind an agent: how it is lost, what comes after, and how weights get there."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from rollpacker.weights.between_hosts.spread import OwnHost, Spread
from rollpacker.weights.buffer import (
    BufferLayout,
    StaleWeightsError,
    WeightBuffer,
    WeightReader,
    WeightSource,
)
from rollpacker.workers.child import state
from rollpacker.workers.host import ThisHost
from rollpacker.workers.hosts.agent import Agent, Said, Start, pause_s
from rollpacker.workers.hosts.facts import HostFacts, differences, facts
from rollpacker.workers.hosts.remote_host import Gone, RemoteHost
from rollpacker.workers.line import Line, LineEnded
from tests.remote.agents import InProcess, Net
from tests.remote.weight_links import LinkedHost

ECHO = "tests.remote.echo"


def wait_for(condition, within_s: float = 60.0) -> None:
    until = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def echoes(line: Line, text: bytes) -> bytes:
    line.send(1, 7, text)
    message = line.receive(60.0)
    assert (message.kind, message.number) == (1, 7)
    return message.payload


def start(host, name: str = "echo"):
    return host.start(ECHO, name, guarded=False, environment={"WORD": "hello"})


@pytest.mark.parametrize("lost", [0.0, 0.3])
def test_messages_come_back_whole_and_in_order(lost):
    host = Net(lost=lost).host()
    process, line = start(host)
    assert echoes(line, b"WORD") == b"hello"
    for number in range(60):
        line.send(2, number, bytes([number]) * number)
    for number in range(60):
        assert line.receive(60.0) == (2, number, bytes([number]) * number)
    wait_for(lambda: process.pid)
    assert state(process.pid)
    line.close()
    assert process.how_ended(60.0) == "exit status 0"
    host.close()


def test_calls_are_the_rarer_the_more_processes_a_host_has():
    net = Net()
    host = net.host()
    lines = [start(host, f"echo {number}")[1] for number in range(12)]
    for line in lines:
        assert echoes(line, b"WORD") == b"hello"
    net.calls.clear()
    began_s = time.monotonic()
    for number in range(10):
        for line in lines:
            line.send(2, number, b"x")
        for line in lines:
            assert line.receive(60.0) == (2, number, b"x")
    most = (time.monotonic() - began_s) / pause_s(len(lines)) + 2
    assert net.calls.count("say") <= most and net.calls.count("hear") <= most
    host.close()


def test_a_large_message_does_not_hold_up_another_process():
    host = Net().host()
    (_, silent), (_, line) = start(host, "silent"), start(host)
    silent.send(3)  # it reads no more
    for _ in range(4):
        silent.send(2, 0, bytes(8 << 20))
    assert echoes(line, b"WORD") == b"hello"
    host.close()


def test_a_host_that_is_cut_off_is_lost_and_what_comes_later_gets_a_new_agent():
    net = Net()
    host = net.host(heartbeat_s=3.0)
    process, line = start(host)
    assert echoes(line, b"WORD") == b"hello"
    net.is_cut.set()
    assert "there has not answered for " in process.how_ended(60.0)
    assert process.went_with_host()
    with pytest.raises(LineEnded):
        line.receive(60.0)
    later, line = start(host)  # waits for the host
    line.send(1, 7, b"WORD")
    net.is_cut.clear()
    assert line.receive(60.0).payload == b"hello"
    assert len(net.agents) > 1 and later.how_ended() is None
    host.close()
    for agent in net.agents:
        agent.close()


def test_a_host_that_cannot_be_reached_for_long_is_tried_no_less_often(monkeypatch):
    """Only agents that were made and did not answer make the next try more patient."""
    net, tries = Net(), iter(range(9))
    net.is_cut.set()

    def connect(predecessor: int) -> InProcess:
        number = next(tries, 9)
        if number < 7:
            raise Gone("nobody is there")
        if number > 7:  # the one before was lost on its way
            net.is_cut.clear()
        return net.connect(predecessor)

    monkeypatch.setattr("rollpacker.workers.hosts.remote_host.RETRY_S", 0.01)
    host = RemoteHost("there", connect, Spread(), heartbeat_s=3.0)
    _, line = start(host)
    assert echoes(line, b"WORD") == b"hello"  # within 60 s; doubled each time it were 72
    host.close()
    for agent in net.agents:
        agent.close()


def test_an_agent_ends_what_it_started_when_nobody_calls():
    ended = threading.Event()
    agent = Agent(lease_s=3.0, end=ended.set)
    agent.say(1, [Start(process=1, module=ECHO, name="e", guarded=False, environment={})])
    (started,) = agent.hear(0).news
    assert ended.wait(60.0)
    assert state(started.pid) == ""


def test_items_that_come_twice_are_taken_once():
    agent = Agent(lease_s=60.0)
    agent.say(1, [Start(process=1, module=ECHO, name="e", guarded=False, environment={})])
    from rollpacker.workers.frames import Message

    for _ in range(2):
        agent.say(2, [Said(1, Message(2, 5, b"once"))])
    wait_for(lambda: len(agent.hear(0).news) > 1)
    time.sleep(0.2)
    assert [type(news).__name__ for news in agent.hear(0).news] == ["Started", "Said"]
    agent.close()


def test_what_cannot_be_started_has_ended():
    host = Net().host()
    process, line = host.start("no.such.module", "x", guarded=False, environment={})
    assert process.how_ended(60.0) == "exit status 1" and not process.went_with_host()
    with pytest.raises(LineEnded):
        line.receive(60.0)
    host.close()


def test_ray_variables_stay_with_the_agent(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/secret")
    host = Net().host()
    _, line = start(host)
    assert echoes(line, b"RAY_AUTH_TOKEN_PATH") == b""
    host.close()


# -- weights ---------------------------------------------------------------------------------------


def weights(size: int) -> WeightBuffer:
    return WeightBuffer.create([("a", torch.zeros(size)), ("b", torch.zeros(3))])


def write(buffer: WeightBuffer, version: int) -> None:
    with buffer.writing(version) as tensors:
        for tensor in tensors.values():
            tensor.fill_(version)


@pytest.mark.parametrize("size", [1, 3 << 20])
def test_each_version_gets_to_each_host_once(size):
    net, spread, buffer = Net(lost=0.1), Spread(), weights(size)
    hosts = [net.remote(f"h{n}", spread) for n in range(2)]
    for version in (1, 2):
        write(buffer, version)
        for host in hosts:
            found = host.weights(buffer.layout.source(version))
            net.calls.clear()
            assert found == host.weights(buffer.layout.source(version))
            assert "take" not in net.calls, "it is there already"
            assert found.layout.inode != buffer.layout.inode
            with WeightReader().reading(found) as tensors:
                assert all((one == version).all() for one in tensors.values())
    for host in hosts:
        host.close()


def slow_trainer(spread: Spread) -> LinkedHost:
    """A host, reached by a slow link, where the trainer writes."""
    writer = LinkedHost("slow", bytes_per_s=8 << 20)
    spread.add("slow", writer)
    return writer


def weights_on_their_way(host: RemoteHost, source: WeightSource, writer: LinkedHost) -> Future:
    """The host takes them; returns once some of them have crossed."""
    taking = ThreadPoolExecutor(1).submit(host.weights, source)
    while writer.link is None or writer.link.num_bytes < 1 << 20:
        assert not taking.done()
        time.sleep(0.005)
    return taking


def test_weights_that_change_on_their_way_are_never_whole_there():
    net, spread, buffer = Net(), Spread(), weights(1 << 20)
    writer, host = slow_trainer(spread), net.remote("there", spread)
    write(buffer, 1)
    source = WeightSource(version=1, layout=replace(buffer.layout, host="slow"))
    taking = weights_on_their_way(host, source, writer)
    write(buffer, 2)
    with pytest.raises(StaleWeightsError, match="changed on their way"):
        taking.result(200)
    (agent,) = net.agents
    there = agent.copy(source.layout)
    with (
        pytest.raises(StaleWeightsError, match=r"only in part|no weights"),
        WeightBuffer(there).reading(1),
    ):
        pass
    host.close()


def test_weights_for_a_host_that_is_lost_meanwhile():
    net, spread, buffer = Net(), Spread(), weights(1 << 20)
    writer, host = slow_trainer(spread), net.remote("there", spread, heartbeat_s=2.0)
    write(buffer, 1)
    source = WeightSource(version=1, layout=replace(buffer.layout, host="slow"))
    taking = weights_on_their_way(host, source, writer)
    net.is_cut.set()
    with pytest.raises(OSError, match="there is lost: there has not answered"):
        taking.result(200)
    for agent in net.agents:
        agent.close()


def hosts_of_a_trainer_apart() -> tuple[list[Net], dict[str, RemoteHost], OwnHost]:
    """Two hosts, of which the trainer may be on one, and the run's own."""
    hosts: dict[str, RemoteHost] = {}
    spread = Spread()
    own, nets = OwnHost(spread), [Net(), Net()]
    for name, net in zip("ab", nets, strict=True):
        hosts[name] = net.remote(name, spread)
    return nets, hosts, own


def test_a_trainer_on_another_host_writes_there_and_all_hosts_read():
    _, hosts, own = hosts_of_a_trainer_apart()
    like = weights(1 << 20)
    held = hosts["a"].hold(BufferLayout.of(like.tensors.items()))
    assert held == hosts["a"].hold(held), "ranks that are started anew write to the same memory"
    assert held.host == "a"
    buffer = WeightBuffer(held)
    for version in (1, 2):
        write(buffer, version)
        source = buffer.layout.source(version)
        assert hosts["a"].weights(source) == source
        for host in (hosts["b"], own):
            there = host.weights(source)
            assert there.layout.inode != held.inode
            with WeightReader().reading(there) as tensors:
                assert all((one == version).all() for one in tensors.values())
    for host in hosts.values():
        host.close()


def test_when_the_trainers_host_is_lost_what_others_have_of_it_is_whole():
    nets, hosts, own = hosts_of_a_trainer_apart()
    buffer = WeightBuffer(hosts["a"].hold(BufferLayout.of(weights(4).tensors.items())))
    write(buffer, 1)
    source = buffer.layout.source(1)
    there = hosts["b"].weights(source)
    nets[0].is_cut.set()
    assert hosts["b"].weights(source) == there
    with pytest.raises(OSError, match=r"a (is lost|cannot be reached)"):
        own.weights(source)
    for host in hosts.values():
        host.close()
    for net in nets:
        for agent in net.agents:
            agent.close()


def test_on_this_machine_weights_are_where_they_are():
    buffer = weights(4)
    assert ThisHost().weights(buffer.layout.source(1)) == buffer.layout.source(1)


# -- facts -----------------------------------------------------------------------------------------


def test_facts_are_of_the_gpus_that_this_process_may_use(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    rows = "".join(f"echo '{n}, GPU-{n}a, {n + 1}'\n" for n in range(4))
    smi.write_text(f"#!/bin/sh\n{rows}")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for listed, mib in (("", [1, 2, 3, 4]), ("2, 0", [3, 1]), ("GPU-3,GPU-1a", [4, 2])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
        assert [size >> 20 for size in facts().gpu_bytes] == mib


def test_facts_of_this_host():
    found = facts()
    assert found.pid == os.getpid() and found.num_cores >= 1
    assert found.versions["torch"] == torch.__version__
    assert found.memory_bytes > 1 << 28
    assert found.interfaces["127.0.0.1"] == "lo"


def test_versions_that_differ_are_named_with_their_hosts():
    one = facts()
    other = HostFacts(
        name="b",
        pid=1,
        num_cores=1,
        memory_bytes=1,
        gpu_bytes=(),
        shm_bytes=1,
        versions={**one.versions, "torch": "9.9"},
        interfaces={},
    )
    assert differences({"a": one, "b": one}) == []
    (said,) = differences({"a": one, "b": other})
    assert said == (f"torch must be the same on all hosts: a has {torch.__version__}, b has 9.9")


def test_an_agent_that_cannot_be_made_is_tried_again():
    net, tries = Net(), []

    def connect(predecessor: int) -> InProcess:
        tries.append(predecessor)
        if len(tries) < 3:
            raise Gone("no such host yet")
        return net.connect(predecessor)

    net_host = net.host()
    net_host.close()
    host = RemoteHost("late", connect, Spread(), heartbeat_s=5.0)
    assert host.facts().pid == os.getpid()
    assert len(tries) == 3
    host.close()
