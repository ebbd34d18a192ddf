"""A group as it is or might be: its jobs with their rollout nodes, its price and its speed. A
layout never changes: placement makes candidates, and compares prices.

The *price of work* is what placement lowers: the group's price per hour over how fast its jobs get
on, each weighed by its value.

    price of work = price_per_h x sum(value) / sum(value x speed)
    speed         = seconds of an iteration alone / seconds of an iteration here
    value         = price per hour of the nodes that the job would need alone

Two jobs with 8 % more work than one pair of nodes has time for cost 1.08 x this pair, instead of
two pairs: a group with too much work may well be the cheapest one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rollpacker.cluster.decide.group import (
    Holds,
    Sharing,
    closed_period_s,
    cycle_s,
    load_s,
    period_s,
    sharing,
)
from rollpacker.cluster.decide.job import ClusterJob, Times
from rollpacker.cluster.decide.nodes import Pool, memory_gib

Pin = frozenset[object]
"""Rollout nodes of one job. A negative number stands for a free node to be chosen at the start."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A group's jobs with pools and rollout nodes (`pins`), jobs of more rollout nodes first."""

    rollout_pool: Pool
    train_pool: Pool
    num_train_nodes: int
    jobs: tuple[ClusterJob, ...]
    pins: tuple[Pin, ...]
    link_gb_s: float = math.inf
    tail_release: bool = True

    def plus(self, job: ClusterJob, pin: Pin) -> Layout:
        """Return the layout with this job added on these rollout nodes."""
        pairs = sorted(
            [*zip(self.jobs, self.pins, strict=True), (job, pin)], key=lambda p: -len(p[1])
        )
        return replace(
            self, jobs=tuple(one for one, _ in pairs), pins=tuple(pin for _, pin in pairs)
        )

    def minus(self, name: str) -> Layout:
        """Return the layout without the job of this name."""
        kept = [(j, p) for j, p in zip(self.jobs, self.pins, strict=True) if j.name != name]
        return replace(self, jobs=tuple(j for j, _ in kept), pins=tuple(p for _, p in kept))

    def with_times(self, job: ClusterJob) -> Layout:
        """Return the layout with the job of this name replaced by `job`, which has other times."""
        return replace(self, jobs=tuple(job if j.name == job.name else j for j in self.jobs))

    # -- what it costs -----------------------------------------------------------------

    @cached_property
    def rollout_nodes(self) -> Pin:
        return Pin().union(*self.pins)

    @property
    def price_per_h(self) -> float:
        return (
            len(self.rollout_nodes) * self.rollout_pool.node_price_per_h
            + self.num_train_nodes * self.train_pool.node_price_per_h
        )

    def price_of_work(self, iteration_s: Sequence[float]) -> float:
        """Return the price of work: the price per hour over the jobs' speeds, each weighed by
        `value`. `iteration_s`: mean seconds of an iteration in the group, for each of `jobs`."""
        value = progress = 0.0
        for job, seconds in zip(self.jobs, iteration_s, strict=True):
            own = self.value(job)
            value += own
            progress += own * sum(job.mean) / seconds
        return self.price_per_h * value / progress

    def value(self, job: ClusterJob) -> float:
        """Price per hour of the nodes that the job would need in these pools if it were alone."""
        return alone_price(job, self.rollout_pool, self.train_pool)

    def memory_fits(self) -> bool:
        """Return whether every node has host memory for its parked jobs (moved off the devices)."""
        if math.fsum(job.train_memory_gib for job in self.jobs) > self.train_pool.host_memory_gib:
            return False
        kept: dict[object, float] = {}
        for job, pin in zip(self.jobs, self.pins, strict=True):
            for node in pin:
                kept[node] = kept.get(node, 0.0) + memory_gib(job, "rollout")
        return max(kept.values()) <= self.rollout_pool.host_memory_gib

    # -- how fast it is ----------------------------------------------------------------

    @cached_property
    def sharings(self) -> tuple[Sharing, ...]:
        """For each job, by how much its times grow or shrink on the group's shared nodes."""
        counts: dict[object, int] = {}
        for pin in self.pins:
            for node in pin:
                counts[node] = counts.get(node, 0) + 1
        return tuple(
            sharing(
                job,
                rollout_nodes=len(pin),
                train_devices=self.num_train_nodes * self.train_pool.devices_per_node,
                rollout_scale=self.rollout_pool.scale,
                train_scale=self.train_pool.scale,
                node_shared=any(counts[node] > 1 for node in pin),
                pool_shared=len(self.jobs) > 1,
                link_gb_s=self.link_gb_s,
                tail_release=self.tail_release,
            )
            for job, pin in zip(self.jobs, self.pins, strict=True)
        )

    def works_s(self) -> list[float]:
        """Return each job's mean seconds of an iteration, less waits and moves off devices."""
        return [one.work_s(job.mean) for job, one in zip(self.jobs, self.sharings, strict=True)]

    def holds(self) -> list[Holds]:
        """Return the seconds for which each job's mean iteration holds each pool, or no pool."""
        return [one.holds(job.mean) for job, one in zip(self.jobs, self.sharings, strict=True)]

    def period_s(self) -> float:
        """Return the seconds in which each job has one turn in round robin, for mean iterations."""
        return period_s(self.holds(), self.pins)

    def closed_period_s(self) -> float:
        """Return a lower bound of `period_s` in seconds, which is quick to compute."""
        return closed_period_s(self.holds(), self.pins)

    def bound(self) -> tuple[float, float, list[float]]:
        """Return what RollMux's policy compares, from jobs' longest rollouts and trainings alone:
        seconds of the longest iteration of any job, seconds for which one turn of every job keeps
        the busiest nodes busy, and the list of each job's seconds."""
        holds = [
            Holds(times.rollout_s * one.rollout_scale, 0.0, times.train_s * one.train_scale, 0.0)
            for times, one in zip(self._worst, self.sharings, strict=True)
        ]
        return cycle_s(holds), load_s(holds, self.pins), [one.cycle_s for one in holds]

    @property
    def _worst(self) -> list[Times]:
        return [job.worst for job in self.jobs]


def alone_price(job: ClusterJob, rollout: Pool, train: Pool) -> float:
    """Return the price per hour of the nodes that a job would have from these pools if alone."""
    return (
        rollout.nodes_for(job.rollout_devices) * rollout.node_price_per_h
        + train.nodes_for(job.train_devices) * train.node_price_per_h
    )
