"""Policies that the shipped one is compared with, such as RollMux's (arXiv 2512.11306). They place
each job when it comes and never move it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from rollpacker.cluster.decide.cheapest_work import CheapestWork
from rollpacker.cluster.decide.forecast import Rest
from rollpacker.cluster.decide.job import ClusterJob
from rollpacker.cluster.decide.layout import Layout
from rollpacker.cluster.decide.placement import Choice, Policy, State, Stays
from rollpacker.cluster.decide.turns import ORDERS
from rollpacker.cluster.sim.spec import ClusterSpec

SHIPPED = "rollpacker"
POLICIES: Mapping[str, str] = {
    SHIPPED: "the shipped one: the price of work, SLOs with the stated confidence",
    "dedicated": "every job has nodes of both pools to itself",
    "colocated": "every job has training nodes to itself, and generates there too",
    "rollmux": "Algorithm 1 as published, for the longest iterations, in round robin",
    "random": "any group with room, or a new one, all alike; SLOs are not looked at",
    "most_idle": "the group with the lowest load; a new one if all are saturated",
}
"""Policies by the name that `--compare` takes, each with a line on where it puts a job."""
NO_TURNS = ("dedicated", "colocated")
"""Names of the policies under which no two jobs share nodes."""


@dataclass(frozen=True, slots=True)
class OwnGroups(Stays):
    """Gives every job a group of its own on the cheapest nodes: no two jobs share nodes."""

    tail_release: bool = False

    def place(self, state: State, job: ClusterJob, *, rest: Rest | None = None) -> Choice | None:
        return min(state.alone(job), key=lambda one: one.layout.price_per_h, default=None)


@dataclass(slots=True)
class AnyGroup(Stays):
    """Puts a job at random into a group with room or into a new one, all equally likely."""

    rng: random.Random
    tail_release: bool = True

    def place(self, state: State, job: ClusterJob, *, rest: Rest | None = None) -> Choice | None:
        groups = [[*state.in_group(number, job)] for number in state.groups]
        choices = [choices for choices in (*groups, [*state.alone(job)]) if choices]
        return self.rng.choice(self.rng.choice(choices)) if choices else None


@dataclass(slots=True)
class MostIdle(Stays):
    """Puts a job into the group (jobs that share nodes) whose busiest nodes have the most time to
    spare in the longest iteration of any of its jobs; if none has any, into a new group."""

    tail_release: bool = True

    def place(self, state: State, job: ClusterJob, *, rest: Rest | None = None) -> Choice | None:
        idle: list[tuple[float, int, Choice]] = []
        for number, standing in state.groups.items():
            cycle, load, _ = standing.layout.bound()
            first = next(state.in_group(number, job), None)
            if load < cycle and first is not None:
                idle.append((load / cycle, number, first))
        if idle:
            return min(idle, key=lambda one: one[:2])[2]
        return OwnGroups().place(state, job)


def policy(name: str, spec: ClusterSpec) -> Policy:
    """Return the policy of this name, one of `POLICIES`, with the cluster's settings `spec`."""
    match name:
        case "rollmux":
            return AsPublished()
        case "random":
            return AnyGroup(random.Random(f"placement/{spec.seed}"))
        case "most_idle":
            return MostIdle()
        case "dedicated" | "colocated":
            return OwnGroups()
    assert name == SHIPPED, name
    orders = ORDERS if spec.order == "auto" else (spec.order,)
    return CheapestWork(confidence=spec.slo_confidence, orders=orders)


class AsPublished(Stays):
    """Algorithm 1 of RollMux: the place that adds least to the price per hour and keeps all SLOs
    even for the longest iterations. With these, all turns of a group must fit into the longest
    iteration of any of its jobs (Fig. 6 there)."""

    tail_release = True

    def place(self, state: State, job: ClusterJob, *, rest: Rest | None = None) -> Choice | None:
        best: tuple[float, Choice] | None = None
        for number, standing in state.groups.items():
            if not may_share(standing.layout, job):
                continue
            cycle, load, _ = standing.layout.bound()
            if load >= cycle:
                continue
            before = standing.layout.price_per_h
            for choice in state.in_group(number, job):
                delta = choice.layout.price_per_h - before
                if (best is None or delta < best[0]) and self._is_feasible(choice.layout):
                    best = (delta, choice)
        for choice in state.alone(job):
            delta = choice.layout.price_per_h
            if best is None or delta < best[0]:
                best = (delta, choice)
        return None if best is None else best[1]

    def _is_feasible(self, layout: Layout) -> bool:
        cycle, load, alone_s = layout.bound()
        return load <= cycle and all(
            max(cycle, load) <= job.slo * seconds
            for job, seconds in zip(layout.jobs, alone_s, strict=True)
        )


def may_share(layout: Layout, job: ClusterJob) -> bool:
    """Return whether the job may join the group: False if, in round robin, one job's longest
    iteration would surely break the SLO (slowdown promised) of another. This is a quick check."""
    seconds = job.worst.rollout_s + job.worst.train_s
    limit = job.slo * seconds
    rollout, train = layout.rollout_pool.scale, layout.train_pool.scale
    lowest = min(rollout, train) * _dilution(layout, job)
    highest = max(rollout, train)
    for one in layout.jobs:
        other = one.worst.rollout_s + one.worst.train_s
        if other * lowest > limit * highest or seconds * lowest > one.slo * other * highest:
            return False
    return True


def _dilution(layout: Layout, job: ClusterJob) -> float:
    """Return the factor by which training gets shorter on the group's nodes, for the job with the
    fewest devices: devices that it asked for over those of the nodes."""
    devices = layout.num_train_nodes * layout.train_pool.devices_per_node
    return min(one.train_devices for one in (*layout.jobs, job)) / devices
