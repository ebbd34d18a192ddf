"""Forecasts the slowdown of each job in a layout (a group's jobs with their nodes).

The jobs' turns are simulated on iterations of random length, the same in every layout: a sequence
of points that fills the unit square evenly chooses the k-th iteration of job n. A slowdown is
elapsed time over time without waits. A job's SLO (highest slowdown promised) is kept with a stated
confidence, whose quantile of the normal distribution is z, if

    mean slowdown + z x (standard deviation of that mean over the iterations left) <= slo

The deviation is computed from sums over several iterations, since neighbouring iterations depend on
each other: they wait for the same long iteration of another job, and two jobs of nearly the same
length meet for many iterations in a row, and then for many not. This takes long to see: a short
simulation rules out bad layouts, and a longer one (`confirmed`) decides.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import msgspec

from rollpacker.cluster.decide.group import Holds
from rollpacker.cluster.decide.job import ClusterJob, Phase
from rollpacker.cluster.decide.layout import Layout
from rollpacker.cluster.decide.turns import Node, Order, Turns
from rollpacker.core.portable import normal_quantile

STRETCH = 4
NUM_STRETCHES = 7
LONG_STRETCH = 8
NUM_LONG_STRETCHES = 6
WARM_UP = 2
"""Iterations left out at the begin of a simulation, because all jobs begin at once there."""
HOPELESS = 1.1
"""Factor: a simulation ends after its first third if a job's mean slowdown is more than this many
times the highest that keeps its SLO."""
_STEP = (0.7548776662466927, 0.5698402909980532)
"""Steps in x and y of the sequence that fills a unit square most evenly (Roberts' R2); its points
choose the iterations that are simulated."""


class Forecast(msgspec.Struct, frozen=True):
    """The forecast of one job's iterations in a layout (a group's jobs with their nodes)."""

    iteration_s: float
    """Mean elapsed seconds of an iteration, waits included."""
    slowdown: float
    """Mean seconds of an iteration, over the mean without waits and moves onto and off devices."""
    deviation: float
    """Standard deviation of the slowdown for a single iteration. Over n iterations the deviation of
    their mean slowdown is this number divided by the square root of n."""

    def bound(self, confidence: float, iterations: int) -> float:
        """Return the slowdown over this many iterations not exceeded with this confidence."""
        if self.deviation == 0.0:
            return self.slowdown
        return self.slowdown + _z(confidence) * self.deviation / math.sqrt(max(iterations, 1))


@functools.cache
def _z(confidence: float) -> float:
    return normal_quantile(confidence)


class Outlook:
    """The forecasts for all jobs of a layout (a group's jobs with their nodes) in one order of
    turns. A method simulates only as many iterations as its answer needs; results are kept."""

    def __init__(self, layout: Layout, order: Order) -> None:
        self.layout = layout
        self._drawn: list[list[tuple[float, Holds]]] = []
        """For each job, each iteration drawn so far (number 0 on): its seconds without waits, and
        the seconds for which it holds each pool."""
        self._early: list[Forecast] | None = None
        self._forecasts: list[Forecast] | None = None
        self._confirmed: list[Forecast] | None = None
        self._timeline: GroupTimeline | None = None
        """The simulation while it is under way. None before its begin and after its end."""
        self._order: Order = order
        if order == "round_robin" and all(map(_is_fixed, layout.jobs)):
            # Fixed iterations in round robin need no run: their period is known.
            period = layout.period_s()
            self._forecasts = [Forecast(period, period / work, 0.0) for work in layout.works_s()]
            self._early = self._confirmed = self._forecasts

    def is_hopeless(self, limits: Sequence[float], most: float = math.inf) -> bool:
        """Return whether, after a third of the short simulation, a job's slowdown is over
        `HOPELESS` times its limit (`limits`), or the price of work over `HOPELESS` times `most`."""
        if self._early is None:
            self._early = self._run(STRETCH, NUM_STRETCHES // 3)
        pairs = zip(self._early, limits, strict=True)
        is_hopeless = any(one.slowdown > HOPELESS * limit for one, limit in pairs)
        if not is_hopeless and most < math.inf:
            price = self.layout.price_of_work([one.iteration_s for one in self._early])
            is_hopeless = price > HOPELESS * most
        if is_hopeless:
            self._stop()
        return is_hopeless

    def forecasts(self) -> list[Forecast]:
        """Return each job's forecast from a short simulation, which rules out bad layouts."""
        if self._forecasts is None:
            self._forecasts = self._run(STRETCH, NUM_STRETCHES)
            self._stop()
        return self._forecasts

    def confirmed(self) -> list[Forecast]:
        """Return each job's forecast from a longer simulation, which decides what is done."""
        if self._confirmed is None:
            self._confirmed = self._run(LONG_STRETCH, NUM_LONG_STRETCHES)
            self._stop()
        return self._confirmed

    def _run(self, stretch: int, count: int) -> list[Forecast]:
        if self._timeline is None:
            pins = [sorted(pin, key=str) for pin in self.layout.pins]
            slos = [job.slo for job in self.layout.jobs]
            self._drawn = [[] for _ in pins]
            self._timeline = GroupTimeline(pins, self._holds, order=self._order, slos=slos)
        self._timeline.run_until(WARM_UP + stretch * count + 1)
        return [
            _forecast(begins, [self._draw(job, n)[0] for n in range(len(begins))], stretch)
            for job, begins in enumerate(self._timeline.begins_s)
        ]

    def _stop(self) -> None:
        """Drop the simulation to free its memory; its forecasts are kept for later questions."""
        self._timeline = None
        self._drawn = []

    def _holds(self, job: int, iteration: int) -> Holds:
        return self._draw(job, iteration)[1]

    def _draw(self, job: int, iteration: int) -> tuple[float, Holds]:
        own = self._drawn[job]
        while len(own) <= iteration:
            times = self.layout.jobs[job].draw(*_point(job, len(own)))
            sharing = self.layout.sharings[job]
            own.append((sharing.work_s(times), sharing.holds(times)))
        return own[iteration]


def foresee(layout: Layout, order: Order) -> list[Forecast]:
    """Return the forecast of each job of the layout (a group's jobs with their nodes) in this order
    of turns, from the longer simulation."""
    return Outlook(layout, order).confirmed()


def _is_fixed(job: ClusterJob) -> bool:
    return len(job.rounds) == 1 and job.rounds[0].mean == job.rounds[0].worst


def _point(job: int, number: int) -> tuple[float, float]:
    """Return the point in the unit square that chooses the job's iteration of this number among the
    measured ones: x its kind of round, y its length."""
    at = number + 1 + 1000 * job
    return (at * _STEP[0]) % 1.0, (at * _STEP[1] + 0.5 * (job % 2)) % 1.0


def _forecast(begins_s: Sequence[float], works_s: Sequence[float], stretch: int) -> Forecast:
    count = (len(begins_s) - 1 - WARM_UP) // stretch
    cuts = [WARM_UP + stretch * n for n in range(count + 1)]
    elapsed = [begins_s[b] - begins_s[a] for a, b in itertools.pairwise(cuts)]
    works = [math.fsum(works_s[a:b]) for a, b in itertools.pairwise(cuts)]
    ratio = math.fsum(elapsed) / math.fsum(works)
    spread = math.fsum((e - ratio * w) ** 2 for e, w in zip(elapsed, works, strict=True))
    deviation = math.sqrt(spread / max(count - 1, 1)) / fmean(works) * math.sqrt(stretch)
    return Forecast(fmean(elapsed) / stretch, ratio, deviation)


HoldsOf = Callable[[int, int], Holds]
"""Function that returns the seconds for which a job holds each pool in an iteration. Arguments: the
numbers of the job and of the iteration, from 0."""


class GroupTimeline:
    """Simulates the turns of a group of jobs in virtual time."""

    def __init__(
        self,
        pins: Sequence[Sequence[Node]],
        holds: HoldsOf,
        *,
        order: Order = "round_robin",
        slos: Sequence[float] = (),
    ) -> None:
        self.begins_s: list[list[float]] = [[] for _ in pins]
        """For each job, the times in seconds at which its rollouts were granted nodes."""
        self.ends_s: list[list[float]] = [[] for _ in pins]
        """For each job, the times in seconds at which its iterations were over."""
        self._holds = holds
        self._turns = Turns(order)
        self._names = [str(number) for number in range(len(pins))]
        self._now: list[Holds] = [Holds(0.0, 0.0, 0.0, 0.0)] * len(pins)
        """For each job, the seconds for which it holds each pool in the iteration under way."""
        self._heap: list[tuple[float, int, int, str]] = []
        self._num_pushed = 0
        for number, pinned in enumerate(pins):
            self._turns.join(self._names[number], pinned, slos[number] if slos else 1.0)
        for number in range(len(pins)):
            self._push(0.0, number, "rollout")

    def run_until(self, iterations: int, *, of_all: bool = True) -> None:
        """Simulate until every job (if not `of_all`: any job) has begun this many iterations."""
        assert self._heap
        enough = all if of_all else any
        while not enough([len(begun) >= iterations for begun in self.begins_s]):
            while not self._step():
                pass

    def _push(self, at_s: float, number: int, what: str) -> None:
        self._num_pushed += 1
        heapq.heappush(self._heap, (at_s, self._num_pushed, number, what))

    def _step(self) -> bool:
        """Simulate the next event. Returns whether a job has begun an iteration at this event."""
        now_s, _, number, what = heapq.heappop(self._heap)
        name = self._names[number]
        if what == "rollout" or what == "train":
            phase: Phase = "rollout" if what == "rollout" else "train"
            granted = self._turns.ask(name, phase, now_s)
        elif what == "left rollout":
            granted = self._turns.leave(name, "rollout", now_s)
            self._push(now_s + self._now[number].between_s, number, "train")
        else:
            granted = self._turns.leave(name, "train", now_s)
            over_s = now_s + self._now[number].after_s
            self.ends_s[number].append(over_s)
            self._push(over_s, number, "rollout")
        return self._granted(granted, now_s)

    def _granted(self, granted: Sequence[tuple[str, Phase]], now_s: float) -> bool:
        has_begun = False
        for name, phase in granted:
            number = int(name)
            if phase == "rollout":
                self._now[number] = self._holds(number, len(self.begins_s[number]))
                self.begins_s[number].append(now_s)
                self._push(now_s + self._now[number].rollout_s, number, "left rollout")
                has_begun = True
            else:
                self._push(now_s + self._now[number].train_s, number, "left train")
        return has_begun


# -- promises ----------------------------------------------------------------------


class Rest(NamedTuple):
    """What is left of a job: its iterations, and the seconds that its SLO still lets it wait."""

    spare_s: float
    """Seconds that the job may wait besides what its SLO lets it wait in its remaining iterations.
    Negative if the job has already waited for longer than its SLO allows."""
    iterations: int

    def slowdown(self, slo: float, work_s: float) -> float:
        """Return the highest slowdown of the remaining iterations with which the job, all counted,
        keeps its SLO. `work_s`: mean seconds of such an iteration without waits."""
        return slo + self.spare_s / (self.iterations * work_s)


def rest_of(job: ClusterJob, rest: Mapping[str, Rest]) -> Rest:
    """Return what is left of the job (iterations, seconds to wait): its entry in `rest`, or else
    all of its steps."""
    return rest.get(job.name) or Rest(0.0, job.steps)


def limits(layout: Layout, rest: Mapping[str, Rest]) -> list[float]:
    """Return for each job the highest slowdown of its remaining iterations that keeps its SLO.
    `rest`: what jobs have left to do and may wait, by name; others have all steps left."""
    return [
        rest_of(job, rest).slowdown(job.slo, work)
        for job, work in zip(layout.jobs, layout.works_s(), strict=True)
    ]


_TOLERANCE = 1e-9


def bounds(
    layout: Layout, forecasts: Sequence[Forecast], rest: Mapping[str, Rest], confidence: float
) -> list[float]:
    """Return for each job the slowdown over its remaining iterations that is not exceeded with
    probability `confidence`. `rest`: what jobs have left, by name. In a group of several jobs a
    wait of one iteration more is allowed for: a job that joins later makes all wait once."""
    joins = len(layout.jobs) > 1
    found = []
    for job, one in zip(layout.jobs, forecasts, strict=True):
        iterations = rest_of(job, rest).iterations
        once = one.slowdown / iterations if joins else 0.0
        found.append(one.bound(confidence, iterations) + once)
    return found


def broken(
    layout: Layout, forecasts: Sequence[Forecast], rest: Mapping[str, Rest], confidence: float
) -> dict[str, tuple[float, float]]:
    """Return by name the jobs whose SLO (highest slowdown promised) would not be kept with
    probability `confidence`: the slowdown of each (`bounds`) and the highest that keeps its SLO.
    `rest`: iterations and seconds to wait that jobs have left, by name."""
    pairs = zip(bounds(layout, forecasts, rest, confidence), limits(layout, rest), strict=True)
    return {
        job.name: (bound, limit)
        for job, (bound, limit) in zip(layout.jobs, pairs, strict=True)
        if bound > limit + _TOLERANCE
    }
