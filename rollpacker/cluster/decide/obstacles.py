"""Explains what keeps a waiting job from every node: which SLOs (slowdowns promised) would break,
and with which SLO of its own it could start now.

It changes no state that decisions use, because a replay of the cluster's events does not know when
an explanation was asked for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from rollpacker.cluster.decide.forecast import Outlook, Rest, broken
from rollpacker.cluster.decide.job import ClusterJob
from rollpacker.cluster.decide.layout import Layout
from rollpacker.cluster.decide.placement import Standing, State
from rollpacker.cluster.decide.turns import Order

MAX_CANDIDATES = 6
"""Number of places for a waiting job that are examined, those in the least loaded groups first."""
_NUM_TRIES = 3
"""Most SLOs that are tried to find one with which a job could start (`_possible`)."""


@dataclass(frozen=True, slots=True)
class _Try:
    """A waiting job as it would be in a group of jobs that share nodes, in one order of turns."""

    layout: Layout
    order: Order
    rest: Mapping[str, Rest]
    """Iterations left and seconds that it may wait, by job; a job not in it has all steps left."""
    breaks: Mapping[str, tuple[float, float]]
    """By name, the jobs whose SLO this would break: each one's slowdown and the highest allowed."""

    @property
    def excess(self) -> float:
        return max(slowdown / max(limit, 1.0) for slowdown, limit in self.breaks.values())


def obstacle(
    state: State, job: ClusterJob, rest: Rest | None, *, confidence: float, orders: Sequence[Order]
) -> str:
    """Return in words why a waiting job gets no nodes; empty if no reason was found. `rest`:
    iterations left and seconds that it may wait; None: it has not waited or run. `confidence`:
    least probability of keeping an SLO. `orders`: orders of turns to try."""
    if next(state.alone(job), None) is not None:
        return ""
    tries = list(_tries(state, job, rest, confidence, orders))
    if not tries:
        why = ", ".join(f"{count} {what}" for what, count in _refusals(state, job).items())
        return f"no free nodes are enough for it alone{f'; of the groups {why}' if why else ''}"
    if not all(one.breaks for one in tries):
        return ""  # it fits by now
    own = [one for one in tries if one.breaks.keys() == {job.name}]
    best = min(own or tries, key=lambda one: one.excess)
    others = " and ".join(one.name for one in best.layout.jobs if one.name != job.name)
    told = f"no free nodes are enough for it alone, and beside {others} " + " and ".join(
        f"{'its own slowdown' if name == job.name else f'the slowdown of {name}'} would be "
        f"{slowdown:.2f} (no more than {max(limit, 1.0):.2f} keeps the SLO)"
        for name, (slowdown, limit) in best.breaks.items()
    )
    slo = _possible(best, job, confidence) if own else None
    return told if slo is None else f"{told}: submitted with --slo {slo:g} it could start there now"


def _tries(
    state: State, job: ClusterJob, rest: Rest | None, confidence: float, orders: Sequence[Order]
) -> Iterator[_Try]:
    own = {} if rest is None else {job.name: rest}
    groups = sorted((_load(standing.layout), n) for n, standing in state.groups.items())
    choices = (choice for _, number in groups for choice in state.in_group(number, job))
    for choice, _ in zip(choices, range(MAX_CANDIDATES), strict=False):
        assert choice.group is not None
        known = {**state.groups[choice.group].rest, **own}
        for order in orders:
            breaks = _breaks(choice.layout, order, known, confidence)
            yield _Try(choice.layout, order, known, breaks)


def _breaks(
    layout: Layout, order: Order, rest: Mapping[str, Rest], confidence: float
) -> dict[str, tuple[float, float]]:
    """Return by name the jobs whose SLO (slowdown promised) breaks in the short or longer
    simulation, with the worse slowdown and the highest allowed. `rest`: what jobs have left."""
    outlook = Outlook(layout, order)
    found = broken(layout, outlook.forecasts(), rest, confidence)
    for name, (slowdown, limit) in broken(layout, outlook.confirmed(), rest, confidence).items():
        found[name] = (max(slowdown, found.get(name, (0.0, limit))[0]), limit)
    return found


def _load(layout: Layout) -> float:
    """Return the share of training nodes' time taken if each job is as slow as its SLO allows."""
    pairs = zip(layout.jobs, layout.holds(), layout.works_s(), strict=True)
    return math.fsum(holds.train_s / work / job.slo for job, holds, work in pairs)


def _possible(one: _Try, job: ClusterJob, confidence: float) -> float | None:
    """Return the lowest SLO (slowdown promised) found for the job with which no SLO in that group
    breaks (is kept with less than `confidence`). None if none was found."""
    rest = {name: known for name, known in one.rest.items() if name != job.name}
    slo, layout = job.slo, one.layout
    for _ in range(_NUM_TRIES):
        breaks = _breaks(layout, one.order, rest, confidence)
        if not breaks:
            return slo
        if breaks.keys() != {job.name}:
            return None
        slo = math.ceil(breaks[job.name][0] * 100) / 100
        layout = layout.with_times(replace(job, slo=slo))
    return None


def _refusals(state: State, job: ClusterJob) -> Counter[str]:
    """Count the groups that cannot take the job whatever its SLO is, by the reason in words."""
    return Counter(_refusal(state, standing, job) for standing in state.groups.values())


def _refusal(state: State, standing: Standing, job: ClusterJob) -> str:
    layout = standing.layout
    if len(layout.jobs) >= state.max_group:
        return f"with max_group ({state.max_group}) jobs"
    if any(map(state.nodes.is_drained, standing.train_nodes)):
        return "with drained nodes"
    if job.train_devices > layout.num_train_nodes * layout.train_pool.devices_per_node:
        return f"with fewer than {job.train_devices} training devices"
    return "without room in host memory, or without enough rollout nodes"
