"""Keeps track of which nodes are free, and of the host memory that jobs use on the others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rollpacker.cluster.decide.job import ClusterJob, Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A pool of equal nodes for one phase, rollout or train."""

    name: str
    phase: Phase
    nodes: int
    devices_per_node: int
    price_per_device_h: float
    host_memory_gib: float
    """GiB of host memory of one node, for what jobs keep there while off its devices."""
    scale: float = 1.0
    """Factor: seconds of the phase here over those a job was submitted with; above 1 is slower."""

    @property
    def node_price_per_h(self) -> float:
        return self.devices_per_node * self.price_per_device_h

    def nodes_for(self, devices: int) -> int:
        return math.ceil(devices / self.devices_per_node)


class Node(NamedTuple):
    """A node: the pool that it belongs to, and its number there, from 0."""

    pool: str
    number: int


def memory_gib(job: ClusterJob, phase: Phase) -> float:
    """Return the GiB of host memory per node of a phase that the job needs when off the devices."""
    return job.rollout_memory_gib if phase == "rollout" else job.train_memory_gib


class Nodes:
    """All nodes of all pools, with their jobs. A node is free or belongs to one group of jobs."""

    def __init__(self, pools: Sequence[Pool]) -> None:
        self.pools = {pool.name: pool for pool in pools}
        self._free: dict[str, list[int]] = {
            pool.name: list(range(pool.nodes - 1, -1, -1)) for pool in pools
        }
        self._jobs: dict[Node, dict[str, float]] = {}
        """For each node in use, the GiB of host memory that each of its jobs needs, by the job's
        name. Copies share the inner dictionaries, which are replaced and never changed."""
        self._drained: set[Node] = set()

    def copy(self) -> Nodes:
        """Return a copy; changes of the copy leave the original as it is."""
        other = Nodes(())
        other.pools = self.pools
        other._free = {pool: [*free] for pool, free in self._free.items()}
        other._jobs = dict(self._jobs)
        other._drained = set(self._drained)
        return other

    def grow(self, pool: str, nodes: int) -> None:
        """Enlarge a pool to so many nodes. Raises `ValueError` for fewer, or an unknown pool."""
        own = self.pools.get(pool)
        if own is None:
            raise ValueError(f"there is no pool {pool}; there are {', '.join(self.pools)}")
        if nodes < own.nodes:
            raise ValueError(
                f"pool {pool} has {own.nodes} nodes by now, and pools do not shrink to {nodes}: "
                f"rollpacker cluster drain {pool}/{own.nodes - 1} takes a node out"
            )
        self._free[pool][:0] = range(nodes - 1, own.nodes - 1, -1)
        self.pools = {**self.pools, pool: replace(own, nodes=nodes)}

    def hide_free(self) -> None:
        """Make no node free any more. Used on a copy, to see which jobs fit on used nodes alone."""
        self._free = {pool: [] for pool in self._free}

    def num_free(self, pool: str) -> int:
        return len(self._free[pool])

    def take(self, pool: str, count: int) -> tuple[Node, ...]:
        """Mark this many free nodes of the pool as used, and return these nodes."""
        free = self._free[pool]
        assert len(free) >= count, (pool, count)
        taken = tuple(Node(pool, free.pop()) for _ in range(count))
        self._jobs |= {node: {} for node in taken}
        return taken

    def give_back(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            jobs = self._jobs.pop(node)
            assert not jobs, (node, jobs)
            if node not in self._drained:
                self._free[node.pool].append(node.number)

    def drain(self, node: Node) -> None:
        """Give no more jobs to the node; jobs that are on it stay until they are moved. Raises
        `ValueError` for a node that does not exist."""
        pool = self.pools.get(node.pool)
        if pool is None or not 0 <= node.number < pool.nodes:
            known = ", ".join(f"{one.name}/0 to {one.nodes - 1}" for one in self.pools.values())
            raise ValueError(f"there is no node {node.pool}/{node.number}; there are {known}")
        self._drained.add(node)
        if node.number in self._free[node.pool]:
            self._free[node.pool].remove(node.number)

    def restore(self, node: Node) -> None:
        """Undo `drain`: the node may be given jobs again."""
        if node in self._drained:
            self._drained.remove(node)
            if node not in self._jobs:
                self._free[node.pool].append(node.number)

    def is_drained(self, node: Node) -> bool:
        return node in self._drained

    def settle(self, job: str, nodes: Iterable[Node], gib: float) -> None:
        """Put a job on these nodes, on each of which it needs this many GiB of host memory."""
        for node in nodes:
            self._jobs[node] = {**self._jobs[node], job: gib}
            assert self.free_gib(node) >= 0, (node, self._jobs[node])

    def unsettle(self, job: str, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self._jobs[node] = {one: gib for one, gib in self._jobs[node].items() if one != job}

    def jobs_on(self, node: Node) -> Sequence[str]:
        return list(self._jobs.get(node, ()))

    def free_gib(self, node: Node) -> float:
        """Return the GiB of the node's host memory that its jobs do not need."""
        return self.pools[node.pool].host_memory_gib - math.fsum(self._jobs[node].values())


def pairs(pools: Iterable[Pool]) -> list[tuple[Pool, Pool]]:
    """Return all pairs of a rollout pool and a training pool, in the pools' order."""
    pools = list(pools)
    return [
        (rollout, train)
        for rollout in pools
        for train in pools
        if rollout.phase == "rollout" and train.phase == "train"
    ]


FEWER: Mapping[Phase, str] = {
    "rollout": "rollout_devices (of a run: rollout.engines)",
    "train": "train_devices (of a run: train.processes)",
}
"""For each phase, the settings to lower if a job needs too many devices, for an error message."""


def check_job(job: ClusterJob, pools: Sequence[Pool]) -> None:
    """Raises `ValueError` if even the largest pool has too few devices or GiB for the job alone."""
    phases: tuple[Phase, ...] = ("rollout", "train")
    for phase in phases:
        there = [pool for pool in pools if pool.phase == phase]
        needed = job.rollout_devices if phase == "rollout" else job.train_devices
        most = max(pool.nodes * pool.devices_per_node for pool in there)
        if needed > most:
            raise ValueError(
                f"job {job.name} needs {needed} {phase} devices, and no {phase} pool has more than "
                f"{most}: lower its {FEWER[phase]} or add nodes to a pool"
            )
        gib = memory_gib(job, phase)
        room = max(pool.host_memory_gib for pool in there)
        if gib > room:
            raise ValueError(
                f"job {job.name} keeps {gib:,.0f} GiB in the host memory of each {phase} node, and "
                f"no {phase} node has more than {room:,.0f}: raise host_memory_gib, or spread the "
                f"job over more devices"
            )
