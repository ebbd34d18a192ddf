"""Makes room for a job that waits for nodes, at the commit of a job that runs.

    by_moving:    The running job goes elsewhere, so that both jobs fit. Its restart counts as
                  waiting, and every SLO is kept nevertheless.
    by_stopping:  The running job, of lower priority, waits instead, if the waiting job would have
                  come before it in the queue (`waiting.py`).

Each restart starts a job that waits, so that there are no more restarts than jobs. A job is stopped
only for jobs of higher priority, which are never stopped for it: no two jobs take each other's
place. They must also be allowed to overtake it in the queue: no job starves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from rollpacker.cluster.decide.forecast import Rest, limits, rest_of
from rollpacker.cluster.decide.job import ClusterJob
from rollpacker.cluster.decide.placement import Choice, Policy, State

WORTH = 2.0
"""Factor: room is made if the waiting job gains at least this many times what restarts cost."""
MAX_STOPPED = 4
"""Number of running jobs that are considered for being stopped, those last in the queue."""


class Late(NamedTuple):
    """A job to be started, with the iterations and the seconds of waiting that it has left."""

    job: ClusterJob
    rest: Rest | None
    """Iterations that the job has left, and seconds that it may wait. None if it has not waited."""


def bearable(job: ClusterJob, rest: Rest) -> Rest:
    """Return what is left (iterations, seconds to wait) of a job that has waited for nodes. If its
    SLO is broken already, its waits are forgotten: else it could share nodes with no other."""
    if rest.slowdown(job.slo, math.fsum(job.mean)) < 1:
        return Rest(0.0, rest.iterations)
    return rest


def restarted(job: ClusterJob, rest: Rest) -> Rest:
    """Return what is left of the job (iterations, seconds to wait) after one more restart, whose
    seconds its SLO counts as waiting."""
    return rest._replace(spare_s=rest.spare_s - job.cold_start_s)


def pays(state: State, number: int, job: ClusterJob, waits: ClusterJob, restarts: float) -> bool:
    """Whether making room for the job `waits` costs less than it loses by waiting until some job of
    the cluster ends. The cost: `restarts` restarts of `job`, which is in group `number`."""
    layout = state.groups[number].layout
    soonest_s = min(
        rest_of(one, standing.rest).iterations * math.fsum(one.mean)
        for standing in state.groups.values()
        for one in standing.layout.jobs
    )
    costs = WORTH * restarts * job.cold_start_s * layout.value(job)
    return costs <= soonest_s * layout.value(waits)


def by_moving(
    policy: Policy, state: State, number: int, job: ClusterJob, rest: Rest, waits: Late
) -> Sequence[tuple[Late, Choice]]:
    """Return places for the running `job` of group `number` and the waiting one, in the order in
    which to start them, once `job` has left. Empty if they do not fit, or `job` would miss its SLO.
    `rest`: iterations that `job` has left and seconds that it may wait."""
    moved = Late(job, restarted(job, rest))
    without = state.copy()
    without.unsettle(job.name, number)
    if policy.place(without, waits.job, rest=waits.rest) is None:
        return ()
    for packs in (False, True):
        for order in ((waits, moved), (moved, waits)):
            found = _in_turn(policy, without.copy(), order, packs)
            if found and _survives(found, moved, rest):
                return found
    return ()


def _in_turn(
    policy: Policy, state: State, jobs: Sequence[Late], packs: bool
) -> Sequence[tuple[Late, Choice]]:
    """Return places for these jobs, found one after the other; empty if a job fits nowhere. With
    `packs` the first job goes to used nodes only, so that free ones are left to the others."""
    found: list[tuple[Late, Choice]] = []
    for n, one in enumerate(jobs):
        there = state.as_if_full() if packs and n == 0 else state
        choice = policy.place(there, one.job, rest=one.rest)
        if choice is None:
            return ()
        state.settle(one.job, choice, tail_release=policy.tail_release, rest=one.rest)
        found.append((one, choice))
    return found


def _survives(found: Iterable[tuple[Late, Choice]], moved: Late, before: Rest) -> bool:
    """Whether the moved job can keep its SLO after its restart. Also true if it could not keep it
    before (`before`: what was left of it then)."""
    assert moved.rest is not None
    choice = next(choice for one, choice in found if one is moved)
    layout, name = choice.layout, moved.job.name
    index = [one.name for one in layout.jobs].index(name)
    return (
        limits(layout, {name: moved.rest})[index] >= 1 or limits(layout, {name: before})[index] < 1
    )


def by_stopping(
    policy: Policy, state: State, behind: Mapping[str, int], waits: Late
) -> tuple[str, Choice] | None:
    """Return the running job to stop and the place that the waiting job then gets, or None if no
    stop helps. `behind`: running jobs that would come after it in the queue, the last first, each
    with the number of its group (the jobs that share the same pools)."""
    for name, number in list(behind.items())[:MAX_STOPPED]:
        without = state.copy()
        without.unsettle(name, number)
        choice = policy.place(without, waits.job, rest=waits.rest)
        if choice is not None:
            return name, choice
    return None
