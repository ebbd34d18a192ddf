"""The shipped policy: jobs go where the price of work (price per hour over the jobs' speeds,
`layout.py`) rises least, while every SLO is likely to be kept as iterations vary
(`forecast.py`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rollpacker.cluster.decide.forecast import Forecast, Rest, broken, foresee, limits, rest_of
from rollpacker.cluster.decide.group import cycle_s, load_s
from rollpacker.cluster.decide.job import ClusterJob
from rollpacker.cluster.decide.layout import Layout
from rollpacker.cluster.decide.obstacles import obstacle
from rollpacker.cluster.decide.placement import (
    Choice,
    Standing,
    State,
)
from rollpacker.cluster.decide.turns import ORDERS, Order

MAX_GROUPS = 12
"""Most groups (jobs that share nodes) that are examined closely for one decision: those whose price
of work a further job would raise least, by a quick estimate."""
MAX_FORESEEN = 4
"""Most places for a job (nodes in a group) that one decision simulates, the cheapest first."""
WORTH = 2.0
"""Factor: a job moves if the move saves this many times what its restart costs."""
DANGER = 0.8
"""A job's SLO (highest slowdown promised) is in danger if the probability of keeping it is below
this. (Jobs are placed with a higher one, `confidence`: else luck alone would have jobs move.)"""
RETRY = 0.9
"""Factor: for a job whose SLO is in danger, another place or order of turns is looked for only once
its iterations left are at most this many times those left at the last attempt."""
MIN_BETTER = 0.002
"""Share of the price by which another order of turns must be cheaper to be preferred."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheapestWork:
    """The shipped policy: a job goes where the price of work (cost per hour over how fast jobs get
    on) rises least while every SLO is kept with `confidence`. Each group of jobs that share nodes
    has the cheapest order of turns that keeps its SLOs."""

    confidence: float = 0.99
    orders: tuple[Order, ...] = ORDERS
    saturate: bool = True
    """Whether jobs that share nodes may together have more work than the nodes have time for."""
    moves: bool = True
    """Whether a running job moves to other nodes if that saves more than its restart costs."""
    tail_release: bool = True
    learns: bool = True
    """Whether measured times of iterations correct the times that a job was submitted with."""
    mends: bool = True
    """Whether a job whose SLO is in danger may get another order of turns, or other nodes."""
    makes_room: bool = True
    """Whether running jobs are moved or stopped, so that a job that waits for nodes can start."""

    def place(self, state: State, job: ClusterJob, *, rest: Rest | None = None) -> Choice | None:
        found = self._cheapest(state, job, rest=rest)
        return None if found is None else found[1]

    def move(self, state: State, number: int, job: ClusterJob, *, rest: Rest) -> Choice | None:
        if self.is_endangered(state.groups[number]):
            mended = self._mend(state, number, job, rest)
            if mended is not None:
                return mended
        if not self.moves:
            return None
        saved = state.groups[number].saved_without(job.name)
        least = min(
            (
                standing.summary.rise(job)
                for other, standing in state.groups.items()
                if other != number and self._may_join(state, standing, job)
            ),
            default=math.inf,
        )
        # Its restart is a wait, which the rest of its life has to make good.
        left_s = rest.iterations * math.fsum(job.mean)
        below = saved * (1 - WORTH * job.cold_start_s / left_s)
        if least >= below:
            return None
        then = rest._replace(spare_s=rest.spare_s - job.cold_start_s)
        found = self._cheapest(state, job, besides=number, rest=then, below=below)
        return None if found is None or found[1].group is None else found[1]

    def obstacle(self, state: State, job: ClusterJob, *, rest: Rest | None = None) -> str:
        return obstacle(state, job, rest, confidence=self.confidence, orders=self.orders)

    def is_endangered(self, standing: Standing) -> bool:
        return self.mends and bool(_endangered(standing))

    def _mend(self, state: State, number: int, job: ClusterJob, rest: Rest) -> Choice | None:
        """Choose another order of turns for group `number` that keeps all SLOs. Without one, choose
        another place for the job, if that keeps its SLO and the others'. None if neither helps, or
        if it is too early to try again. `rest`: what is left of the job (iterations, waiting)."""
        standing = state.groups[number]
        if rest.iterations > RETRY * standing.tried.get(job.name, math.inf):
            return None
        standing.tried[job.name] = rest.iterations
        layout = standing.layout
        best: tuple[float, Order] | None = None
        for order in self.orders:
            if order == standing.order:
                continue
            forecasts = foresee(layout, order)
            if not broken(layout, forecasts, standing.rest, self.confidence):
                price = layout.price_of_work([one.iteration_s for one in forecasts])
                best = min(best or (price, order), (price, order))
        if best is not None:
            pin = layout.pins[layout.jobs.index(job)]
            return Choice(group=number, layout=layout, pin=pin, order=best[1])
        others = layout.minus(job.name)
        if not others.jobs or _in_danger(others, foresee(others, standing.order), standing.rest):
            return None
        then = rest._replace(spare_s=rest.spare_s - job.cold_start_s)
        found = self._cheapest(state, job, besides=number, rest=then)
        if found is None or limits(found[1].layout, {job.name: then})[_index(found[1], job)] < 1:
            return None
        return found[1]

    def _may_join(self, state: State, standing: Standing, job: ClusterJob) -> bool:
        return len(standing.layout.jobs) < state.max_group and standing.summary.could_take(job)

    def _cheapest(
        self,
        state: State,
        job: ClusterJob,
        *,
        besides: int | None = None,
        rest: Rest | None = None,
        below: float = math.inf,
    ) -> tuple[float, Choice] | None:
        """Return the smallest rise of the price of work (price per hour over the jobs' speeds), and
        the place of the job that brings it; None if no rise is less than `below`. `besides`: number
        of a group to leave out. `rest`: iterations that the job has left and seconds that it may
        wait; None: all of its steps."""
        own = {} if rest is None else {job.name: rest}
        quick = sorted(
            (standing.summary.rise(job), number)
            for number, standing in state.groups.items()
            if number != besides and self._may_join(state, standing, job)
        )
        found = [
            (choice.layout.price_of_work(_iterations_at_least(choice.layout)), n, choice)
            for _, number in quick[:MAX_GROUPS]
            for n, choice in enumerate(state.in_group(number, job))
        ]
        rises = sorted(
            (
                least - state.groups[_number(choice)].summary.price_of_work,
                _number(choice),
                n,
                choice,
            )
            for least, n, choice in found
        )
        best: tuple[float, Choice] | None = None
        for choice in state.alone(job):
            price = choice.layout.price_per_h * choice.layout.works_s()[0] / sum(job.mean)
            if price < below:
                below, best = price, (price, choice)
        tried = 0
        for least, number, _, choice in rises:
            if tried == MAX_FORESEEN or least >= below:
                break  # the others are dearer still
            if not self.saturate and _is_over_saturated(choice.layout):
                continue
            tried += 1
            standing = state.groups[number]
            now = standing.summary.price_of_work
            priced = self._best_order(standing, choice, job, {**standing.rest, **own}, now + below)
            if priced is not None:
                rise = priced[0] - now
                below, best = rise, (rise, replace(choice, order=priced[1]))
        return best

    def _best_order(
        self,
        standing: Standing,
        choice: Choice,
        job: ClusterJob,
        rest: Mapping[str, Rest],
        below: float,
    ) -> tuple[float, Order] | None:
        """Return the lowest price of work (`_price`) of a group that the job joins, with its order
        of turns. None if no order that keeps all SLOs costs less than `below`."""
        layout = choice.layout
        best: tuple[float, Order] | None = None
        allowed = limits(layout, rest)
        period = layout.closed_period_s()
        hopeless = any(
            period > limit * work for limit, work in zip(allowed, layout.works_s(), strict=True)
        )
        for order in self.orders:
            if hopeless and order == "round_robin":
                continue  # varied iterations take longer than mean ones
            outlook = standing.outlook(choice, job, order)
            if outlook.is_hopeless(allowed, below):
                continue
            # The longer run decides, where the short one finds nothing against it.
            price = self._price(layout, outlook.forecasts(), rest)
            if price < below:
                price = self._price(layout, outlook.confirmed(), rest)
            if price < below:
                best, below = (price, order), price * (1 - MIN_BETTER)
        return best

    def _price(
        self, layout: Layout, forecasts: Sequence[Forecast], rest: Mapping[str, Rest]
    ) -> float:
        """Return the group's price of work (price per hour over jobs' speeds) by these forecasts,
        or infinity if some job would miss its SLO."""
        if broken(layout, forecasts, rest, self.confidence):
            return math.inf
        return layout.price_of_work([one.iteration_s for one in forecasts])


def _index(choice: Choice, job: ClusterJob) -> int:
    return [one.name for one in choice.layout.jobs].index(job.name)


def _endangered(standing: Standing) -> list[str]:
    if len(standing.layout.jobs) == 1:
        return []
    return _in_danger(standing.layout, standing.forecasts, standing.rest)


def _in_danger(
    layout: Layout, forecasts: Sequence[Forecast], rest: Mapping[str, Rest]
) -> list[str]:
    """Return the group's jobs whose SLO is likely to be missed, but not if they waited no more."""
    return [
        job.name
        for job, one, limit in zip(layout.jobs, forecasts, limits(layout, rest), strict=True)
        if 1 <= limit < one.bound(DANGER, rest_of(job, rest).iterations)
    ]


def _number(choice: Choice) -> int:
    assert choice.group is not None
    return choice.group


def _iterations_at_least(layout: Layout) -> list[float]:
    """Estimate each job's mean seconds per iteration as if sharing slowed all jobs of the group by
    one factor, the smallest for which the busiest nodes have time enough."""
    holds, works = layout.holds(), layout.works_s()
    busy: dict[object, float] = {}
    for pin, one, work in zip(layout.pins, holds, works, strict=True):
        for node in pin:
            busy[node] = busy.get(node, 0.0) + one.rollout_s / work
    trained = math.fsum(one.train_s / work for one, work in zip(holds, works, strict=True))
    stretch = max(1.0, trained, *busy.values())
    return [work * stretch for work in works]


def _is_over_saturated(layout: Layout) -> bool:
    holds = layout.holds()
    return load_s(holds, layout.pins) > cycle_s(holds)
