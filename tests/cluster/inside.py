"""Tests that run on one host of a cluster, as a run would: `test_cluster.py` starts them there."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.resume import write_model
from rollpacker.trainer.launch import RankPlace, Ranks
from rollpacker.trainer.model import load_model
from rollpacker.trainer.process_trainer import ProcessTrainer
from rollpacker.trainer.setup import build_learner
from rollpacker.trainer.torch_trainer import TorchTrainer
from rollpacker.weights.between_hosts.spread import OwnHost, Spread
from rollpacker.weights.buffer import StaleWeightsError, WeightBuffer, WeightReader
from rollpacker.workers.host import ThisHost
from rollpacker.workers.hosts.ray_agents import RayCluster, join
from rollpacker.workers.hosts.remote_host import RemoteHost
from rollpacker.workers.hosts.token import demand_token
from tests.trainer.test_process_trainer import samples_of, setup_of, weights

MBIT = 100
MODEL_BYTES = 50_000_000


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    demand_token()
    cluster = join()
    cluster.reserve({address: {"CPU": 1.0} for address in cluster.nodes}, within_s=120.0)
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def hosts(cluster: RayCluster) -> Iterator[list[RemoteHost]]:
    """All but this one."""

    spread = Spread()
    OwnHost(spread, address=cluster.own_address)
    _, *others = cluster.nodes
    found = [RemoteHost(o, cluster.connect(o), spread, heartbeat_s=5.0) for o in others]
    for host in found:
        host.facts()
    yield found
    for host in found:
        host.close()


def written(version: int, size: int = MODEL_BYTES) -> WeightBuffer:
    buffer = WeightBuffer.create([("weights", torch.zeros(size // 4))])
    with buffer.writing(version) as tensors:
        tensors["weights"].copy_(torch.arange(size // 4) * version)
    return buffer


def test_ranks_on_three_hosts_compute_the_gradients_of_one_process(cluster, hosts, tmp_path):
    """Four ranks of which two are on other hosts. That the gradient does not depend on who computes
    it is shown in float64 by tests/trainer/test_partition.py; a run has float32."""
    write_model(tmp_path)
    setup = setup_of(tmp_path)
    alone = TorchTrainer(build_learner(setup))
    facts = {host.name: host.facts() for host in hosts}
    own = cluster.facts(cluster.own_address)

    def place(number: int, host: ThisHost | RemoteHost) -> RankPlace:
        address = host.name if isinstance(host, RemoteHost) else cluster.own_address
        interfaces = facts[address].interfaces if address in facts else own.interfaces
        return RankPlace(number, host, {"GLOO_SOCKET_IFNAME": interfaces[address]})

    places = [place(0, ThisHost()), place(1, ThisHost()), *(place(0, host) for host in hosts)]
    train = dataclasses.replace(setup.train, processes=len(places), replicas=2)
    apart = ProcessTrainer(
        dataclasses.replace(setup, train=train),
        Ranks(len(places), places, cluster.own_address),
        load_model(setup.model).model.named_parameters(),
    )
    assert len(set(apart.pids)) == len(places)

    async def step(trainer: TorchTrainer | ProcessTrainer, seed: int) -> dict[str, float]:
        await trainer.accumulate(await samples_of(trainer, seed))
        return dict(await trainer.apply())

    for seed in range(3):
        one, several = (asyncio.run(step(trainer, seed)) for trainer in (alone, apart))
        assert several["actor/grad_norm"] == pytest.approx(one["actor/grad_norm"], rel=1e-5)
    expected = dict(alone.learner.model.named_parameters())
    found = weights(apart)[0]
    apart_by = [float((expected[name].detach() - found[name]).abs().max()) for name in expected]
    assert max(apart_by) < 1e-6
    apart.close()


def test_a_trainer_that_is_all_on_another_host(cluster, hosts, tmp_path):
    """The run's host has none of it, as one without a GPU would not, and reads its weights."""
    write_model(tmp_path)
    setup = setup_of(tmp_path)
    beside = TorchTrainer(build_learner(setup))
    there, other = hosts
    interface = there.facts().interfaces[there.name]
    places = [RankPlace(0, there, {"GLOO_SOCKET_IFNAME": interface})]
    trainer = ProcessTrainer(
        dataclasses.replace(setup, train=dataclasses.replace(setup.train, processes=1)),
        Ranks(1, places, cluster.own_address),
        load_model(setup.model).model.named_parameters(),
    )
    for version in (1, 2):
        for one in (beside, trainer):
            asyncio.run(one.accumulate(asyncio.run(samples_of(one, version))))
            asyncio.run(one.apply())
        source = asyncio.run(trainer.hand_over()).weights
        assert source is not None and source.layout.host == there.name and source.version == version
        expected = dict(beside.learner.model.named_parameters())
        for host in (OwnHost(there._spread, address=cluster.own_address), there, other):
            with WeightReader().reading(host.weights(source)) as tensors:
                assert tensors.keys() == expected.keys()
                for name, tensor in tensors.items():
                    torch.testing.assert_close(tensor, expected[name].detach())
    trainer.close()


def test_weights_take_as_long_as_the_slowest_link_does(hosts):
    """One of the hosts is behind a link of 100 Mbit/s."""
    if "ROLLPACKER_SLOW" not in os.environ:
        pytest.skip("no link is held")
    asked, limit_s = written(1), 1.3 * MODEL_BYTES * 8 / (MBIT * 1e6)
    began = time.monotonic()
    slow, fast = hosts
    there = slow.weights(asked.layout.source(1))
    took = time.monotonic() - began
    print(f"50 MB over {MBIT} Mbit/s: {took:.2f} s, at most {limit_s:.2f} s asked")
    with WeightReader().reading(there) as tensors:
        assert torch.equal(tensors["weights"], asked.tensors["weights"])
    with WeightReader().reading(fast.weights(asked.layout.source(1))) as tensors:
        assert torch.equal(tensors["weights"], asked.tensors["weights"])
    assert took <= limit_s


def test_published_weights_leave_this_host_once(hosts):
    """The interface's bytes, with all that ray says meanwhile."""
    spread = hosts[0]._spread
    asked = written(1)
    counter = Path("/sys/class/net/eth0/statistics/tx_bytes")
    before = int(counter.read_text())
    assert spread.publish([asked.layout.source(1)], hosts) == {}
    across = int(counter.read_text()) - before
    print(f"{across / MODEL_BYTES:.4f} models have left for {len(hosts)} hosts")
    for host in hosts:
        with WeightReader().reading(host.weights(asked.layout.source(1))) as tensors:
            assert torch.equal(tensors["weights"], asked.tensors["weights"])
    assert MODEL_BYTES <= across <= 1.01 * MODEL_BYTES


def test_a_host_that_is_cut_off_in_the_middle_of_an_update_has_no_weights(hosts):
    if "ROLLPACKER_CUT" not in os.environ:
        pytest.skip("no link can be cut")
    host, first = hosts[0], written(1)
    there = host.weights(first.layout.source(1))
    with first.writing(2) as tensors:
        tensors["weights"].fill_(2.0)
    subprocess.Popen(["sh", "-c", f"sleep 1; {os.environ['ROLLPACKER_CUT']}"])
    with pytest.raises(OSError, match="is lost"):
        host.weights(first.layout.source(2))
    for version in (1, 2):  # on this machine, where all hosts are
        with pytest.raises(StaleWeightsError), WeightBuffer(there.layout).reading(version):
            pass


def test_without_the_token_every_call_is_refused(cluster, tmp_path):
    """Of ten tries with a wrong token and ten with none, none gets in."""
    address = os.environ["RAY_ADDRESS"]
    wrong = tmp_path / "token"
    wrong.touch(0o600)
    wrong.write_text("0" * 64)
    tried = (
        "import ray, sys\n"
        f"ray._raylet.GcsClient(address='{address}').get_all_node_info(timeout=5)\n"
    )
    for variables in (
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(wrong)},
        {"RAY_AUTH_MODE": "disabled"},
    ):
        processes = [
            subprocess.Popen(
                [os.environ["ROLLPACKER_PYTHON"], "-c", tried],
                env={**os.environ, **variables},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for _ in range(3)
        ]
        for process in processes:
            _, said = process.communicate(timeout=120)
            assert process.returncode != 0
            assert "token" in said.lower() or "auth" in said.lower(), said[-2000:]


def listening() -> set[tuple[str, int]]:
    """Address and port of every socket of this host that takes connections (TCP, IPv4)."""
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A":
            address, port = fields[1].split(":")
            numbers = bytes.fromhex(address)[::-1]
            found.add((".".join(map(str, numbers)), int(port, 16)))
    return found


def test_no_socket_of_ours_is_outside_of_the_declared_address(cluster, tmp_path):
    """What a trainer with ranks adds to what ray listens on."""
    write_model(tmp_path)
    before = listening()
    setup = setup_of(tmp_path)
    train = dataclasses.replace(setup.train, processes=2)
    interface = cluster.facts(cluster.own_address).interfaces[cluster.own_address]
    places = [RankPlace(n, ThisHost(), {"GLOO_SOCKET_IFNAME": interface}) for n in range(2)]
    trainer = ProcessTrainer(
        dataclasses.replace(setup, train=train),
        Ranks(2, places, cluster.own_address),
        load_model(setup.model).model.named_parameters(),
    )
    asyncio.run(trainer.hand_over())
    ours = {address for address, _ in listening() - before}
    trainer.close()
    assert ours and ours <= {cluster.own_address, "127.0.0.1"}
    print("ray listens on", sorted({address for address, _ in before}))
