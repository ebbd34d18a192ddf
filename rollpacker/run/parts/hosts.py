"""The hosts of a run (this machine, or those of a ray cluster with `runtime=ray`), and which
process starts on which host."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollpacker.config.schema import RunConfig
    from rollpacker.core.placement.roles import Placement
    from rollpacker.trainer.launch import RankPlace
    from rollpacker.weights.buffer import WeightSource
    from rollpacker.workers.host import Host
    from rollpacker.workers.hosts.facts import HostFacts
    from rollpacker.workers.hosts.ray_agents import RayCluster

LOOK_S = 2.0
HEAD_S = 15.0
"""Seconds without an answer after which ray's head process counts as lost."""
RESERVE_S = 60.0
"""Seconds that ray may take to reserve the run's devices, which other programs may hold."""
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables for torch's allocator: today's name, and an earlier one, also heeded."""
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables with the network interface for torch's collectives, by backend."""
SHM_BYTES = 64 << 20
"""Bytes that must be free in a host's /dev/shm, through which torch and vLLM share memory."""


@dataclass(slots=True)
class Hosts:
    """The hosts of one run, and which of its processes is started on which of them."""

    plan: Placement | None = None
    """Which devices the engines, the trainer and the judge (a model that rates responses) get. None
    if there is nothing to place: on this machine's processors without `placement`, or if the run's
    own process generates and trains."""
    is_reserved: bool = False
    """Whether ray has reserved the plan's devices: a process's GPUs then count among the reserved
    ones of its host (`ThisHost.gpus`), which need not have the numbers of the plan."""
    by_name: Mapping[str, Host] = field(default_factory=dict)
    interfaces: Mapping[str, str] = field(default_factory=dict)
    """Name of the network interface through which a host reaches the others, by host name."""
    address: str = "127.0.0.1"
    """Network address of this machine, as other hosts reach it."""
    publish: Callable[[WeightSource], dict[str, Exception]] = lambda source: {}
    """Copies new weights to all hosts with engines. Returns the errors of failed hosts, by host."""
    close: Callable[[], None] = lambda: None
    is_there: Callable[[], bool] | None = None
    """Tells whether ray's head process answers. None if the run uses no ray cluster."""
    _ended: threading.Event = field(default_factory=threading.Event)

    def watch(self, fail: Callable[[BaseException], None]) -> None:
        """Call `fail` with a `HostsLost`, from a thread, if ray's head is lost. Ray itself would
        end this process a minute later, without a message that helps."""
        if self.is_there is not None:
            threading.Thread(target=self._watch, args=(fail,), daemon=True).start()

    def _watch(self, fail: Callable[[BaseException], None]) -> None:
        from rollpacker.run.errors import HostsLost

        assert self.is_there is not None
        silent_s = 0.0
        while not self._ended.wait(LOOK_S):
            silent_s = 0.0 if self.is_there() else silent_s + LOOK_S
            if silent_s > HEAD_S:
                fail(
                    HostsLost(
                        f"ray's head has not answered for {silent_s:.0f} s: start it and the nodes "
                        "again, and go on with --resume"
                    )
                )
                return

    def of_engine(self, number: int, degree: int) -> tuple[Host, dict[str, str]]:
        """Returns the host and the environment variables for the process of an engine. `number`:
        the engine's number, from 0. `degree`: number of devices of each engine."""
        from rollpacker.workers.host import ThisHost

        if self.plan is None:
            return ThisHost(), {}
        devices = self._devices("rollout")[number * degree : (number + 1) * degree]
        return self._place(devices)

    def of_ranks(self) -> list[RankPlace]:
        """Returns the host and the environment variables for each of the trainer's processes."""
        from rollpacker.trainer.launch import RankPlace

        places = [self._place([device]) for device in self._devices("train")]
        assert self.plan is not None
        if self.plan.kind == "cuda" and not any(name in os.environ for name in ALLOCATOR):
            # Micro-batches differ in size, and would leave holes in fixed segments of memory.
            for _, environment in places:
                environment[ALLOCATOR[0]] = "expandable_segments:True"
        # On CUDA each sees its own device alone, which is its first.
        return [RankPlace(0, host, environment) for host, environment in places]

    def of_reward_models(self) -> list[dict[str, str]]:
        """Returns all environment variables of a worker of a reward model, for each device of
        theirs. Empty if they have none of their own, and on a CPU. Raises `ValueError` if a device
        is not on the run's host, where rewards are judged."""
        from rollpacker.workers.host import ThisHost, variables_of

        if self.plan is None or self.plan.kind == "cpu":
            return []
        found = []
        for device in self._devices("reward"):
            host, environment = self._place([device])
            if not isinstance(host, ThisHost):
                raise ValueError(
                    f"placement.reward has a device on {host.name}, and rewards are judged on the "
                    f"run's host, {self.address}: name devices of that host"
                )
            found.append(variables_of(host, environment))
        return found

    def beside_engines(self, per_host: int) -> list[Host]:
        """Returns every host with engines, `per_host` times each: one entry for each process of
        rewards or environments to start."""
        from rollpacker.workers.host import ThisHost

        here = ThisHost()
        if self.plan is None:
            return [here] * per_host
        names = dict.fromkeys(self.plan.devices[n].host for n in self._devices("rollout"))
        return [self.by_name.get(name, here) for name in names for _ in range(per_host)]

    def _devices(self, role: str) -> list[int]:
        assert self.plan is not None
        return [device for unit in self.plan.of(role) for device in unit.devices]

    def _place(self, devices: Sequence[int]) -> tuple[Host, dict[str, str]]:
        from rollpacker.cluster.service.local_runner import MARK
        from rollpacker.workers.host import GPUS, ThisHost

        assert self.plan is not None
        there = [self.plan.devices[device] for device in devices]
        name = there[0].host
        # By its mark a cluster's service finds all processes of a job.
        environment = {MARK: os.environ[MARK]} if MARK in os.environ else {}
        if self.plan.kind == "cuda":
            counted = [one.local for one in self.plan.devices
                       if one.host == name and (one.units or not self.is_reserved)]  # fmt: skip
            environment[GPUS] = ",".join(str(counted.index(one.local)) for one in there)
        if name in self.interfaces:
            environment |= dict.fromkeys(INTERFACES, self.interfaces[name])
        return self.by_name.get(name) or ThisHost(), environment


def open_hosts(config: RunConfig) -> tuple[RunConfig, Hosts]:
    """Returns the config, with the keys filled in that its `placement` implies, and the hosts,
    connected. Raises `ValueError` if hosts cannot be reached, differ, or lack something."""
    from rollpacker.run.parts.cluster_facts import facts_of, join_cluster, rooms_of
    from rollpacker.run.parts.placement import on_nodes, on_this_host, placed, plan_of

    if config.runtime == "local":
        config, plan = on_this_host(config)
        return config, _on_this_host(config, plan)
    cluster = join_cluster()
    try:
        facts = facts_of(cluster)
        rooms = rooms_of(cluster, facts)
        nodes = nodes_of(os.environ)
        plan = plan_of(on_nodes(config, rooms, nodes) if nodes else config, rooms)
        config = placed(config, plan)
        return config, _on_cluster(config, cluster, plan, facts)
    except BaseException:
        cluster.close()
        raise


def _on_this_host(config: RunConfig, plan: Placement | None) -> Hosts:
    """Returns this machine as the only host. On CUDA the run's own process, if it generates or
    trains beside processes of the other role, computes on that role's first GPU from now on."""
    if plan is not None and plan.kind == "cuda" and config.run_computes:
        import torch

        role = "train" if config.engines_are_apart else "rollout"
        torch.cuda.set_device(plan.devices[plan.of(role)[0].devices[0]].local)
    return Hosts(plan=plan)


def nodes_of(environ: Mapping[str, str]) -> dict[str, list[str]]:
    """Returns the names of the hosts that a cluster's scheduler gave this run, for engines
    ("rollout") and trainer ("train"), from environment variables. Empty: all hosts."""
    from rollpacker.cluster.on_ray.warden import HOSTS

    return {role: environ[name].split(",") for role, name in HOSTS.items() if name in environ}


def _on_cluster(
    config: RunConfig, cluster: RayCluster, plan: Placement, facts: Mapping[str, HostFacts]
) -> Hosts:
    from rollpacker.cluster.service.local_runner import MARK
    from rollpacker.weights.between_hosts.spread import OwnHost, Spread
    from rollpacker.workers.hosts.remote_host import RemoteHost

    own = cluster.own_address
    used = [host for host in facts if any(d.host == host and d.units for d in plan.devices)]
    _check(config, cluster, plan, {host: facts[host] for host in used})
    cluster.reserve({host: _devices_on(host, plan) for host in used}, within_s=RESERVE_S)
    remote: dict[str, RemoteHost] = {}
    spread = Spread()
    heartbeat_s = config.deadlines.heartbeat_s
    for host in used:
        if host != own:
            remote[host] = RemoteHost(host, cluster.connect(host), spread, heartbeat_s=heartbeat_s)
    own_host = OwnHost(spread, address=own, gpus=cluster.own_gpus)
    members: dict[str, RemoteHost | OwnHost] = {**remote, own: own_host}
    engines = {plan.devices[device].host for unit in plan.of("rollout") for device in unit.devices}
    ended = threading.Event()

    def close() -> None:
        ended.set()
        own_host.close()
        for host in remote.values():
            host.close()
        cluster.close()

    return Hosts(
        is_there=cluster.has_head,
        _ended=ended,
        plan=plan,
        is_reserved=MARK not in os.environ,
        by_name=members,
        publish=lambda source: spread.publish(
            [source], [members[name] for name in sorted(engines)]
        ),
        interfaces={
            host: facts[host].interfaces[host]
            for host in used
            if remote and host in facts[host].interfaces
        },
        address=own if remote else "127.0.0.1",
        close=close,
    )


def _devices_on(host: str, plan: Placement) -> dict[str, float]:
    """Returns how many devices ray is to reserve on this host, by ray's name for them ("CPU" or
    "GPU"): 0 if a cluster's scheduler started this run, as jobs use devices in turn."""
    from rollpacker.cluster.service.local_runner import MARK

    count = 0
    if MARK not in os.environ:
        count = sum(1 for device in plan.devices if device.host == host and device.units)
    return {"CPU" if plan.kind == "cpu" else "GPU": float(count)}


def _check(
    config: RunConfig, cluster: RayCluster, plan: Placement, facts: Mapping[str, HostFacts]
) -> None:
    """Raise `ValueError` if a host lacks the model's files or free /dev/shm, or if a host of the
    trainer cannot see the run's folder."""
    model = Path(config.model.path)
    for host, one in facts.items():
        if model.exists() and not cluster.sees(host, str(model.resolve())):
            raise ValueError(
                f"{host} has no {model.resolve()} (model.path): put the model there under the same "
                "path, or on a file system that all hosts share"
            )
        if one.shm_bytes < SHM_BYTES:
            raise ValueError(
                f"/dev/shm of {host} has {one.shm_bytes >> 20} MiB free, and processes there share "
                f"memory through it: let it have {SHM_BYTES >> 20} MiB or more (in a container: "
                "--shm-size)"
            )
    ranks = {plan.devices[device].host for unit in plan.of("train") for device in unit.devices}
    others = sorted(ranks - {cluster.own_address})
    if others:
        _check_shared(config, cluster, others)


def _check_shared(config: RunConfig, cluster: RayCluster, hosts: Sequence[str]) -> None:
    """Raise `ValueError` if one of these hosts cannot see the run's folder, where the trainer's
    processes on them write parts of a checkpoint."""
    runs = Path(config.runs_dir).expanduser().resolve()
    runs.mkdir(parents=True, exist_ok=True)
    probe = runs / f".seen-by-all-{os.getpid()}"
    probe.touch()
    try:
        blind = [host for host in hosts if not cluster.sees(host, str(probe))]
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    if blind:
        raise ValueError(
            f"{', '.join(blind)} cannot see {runs} (runs_dir), where processes of the trainer there"
            " would write their part of a checkpoint: put runs_dir on a file system that all hosts "
            "share, or place the trainer on one host"
        )
