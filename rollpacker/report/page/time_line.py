"""The timeline on a run's page: each step's rounds and phases, and the samples of some steps."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollpacker.core.commands import RoundKind
from rollpacker.core.ids import SampleId
from rollpacker.report.page.packing import Texts
from rollpacker.report.step_history import Outcome, StepHistory

MAX_BARS = 40_000
"""Maximum number of samples that the page shows as bars: a quarter in the first steps, half in the
last, and the rest in the steps that took longest."""
MAX_STEPS = 20_000
"""Maximum number of steps shown with their rounds and phases: the last ones of a longer run."""

KINDS = tuple(str(kind) for kind in RoundKind)
OUTCOMES = tuple(str(outcome) for outcome in Outcome)


@dataclass(slots=True)
class _Bars:
    """The samples of a step, as bars of the timeline. Times are in seconds since the step began."""

    step: int
    seconds: float
    ids: list[SampleId]
    start_s: list[float] = field(default_factory=list)
    end_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    outcome: list[int] = field(default_factory=list)

    def __lt__(self, other: _Bars) -> bool:
        return self.seconds < other.seconds


@dataclass(slots=True)
class _Step:
    step: int
    start_s: float
    end_s: float
    rounds: list[tuple[int, float, float, int]]
    """Rounds of the step as (index of the kind in `KINDS`, start, end, number of samples), with
    times in seconds since the step began."""
    phases: list[tuple[str, float, float]]


class TimeLine:
    """Gathers every committed step by `feed`; `plain` returns the timeline's data for the page."""

    def __init__(self, max_bars: int = MAX_BARS, max_steps: int = MAX_STEPS) -> None:
        self._max_bars = max_bars
        self._steps: deque[_Step] = deque(maxlen=max_steps)
        self._first: list[_Bars] = []
        self._last: deque[_Bars] = deque()
        self._longest: list[_Bars] = []
        self._num = {"first": 0, "last": 0, "longest": 0}

    def feed(self, step: StepHistory) -> None:
        self._steps.append(_step(step))
        bars = _bars(step)
        num, quarter = self._num, self._max_bars // 4
        if num["first"] + len(bars.ids) <= quarter or not self._first:
            self._first.append(bars)
            num["first"] += len(bars.ids)
            return
        self._last.append(bars)
        num["last"] += len(bars.ids)
        while num["last"] > 2 * quarter and len(self._last) > 1:
            self._keep_longest(self._last.popleft(), quarter)

    def _keep_longest(self, bars: _Bars, most: int) -> None:
        num = self._num
        num["last"] -= len(bars.ids)
        heapq.heappush(self._longest, bars)
        num["longest"] += len(bars.ids)
        while num["longest"] > most and self._longest:
            num["longest"] -= len(heapq.heappop(self._longest).ids)

    def plain(self) -> dict[str, Any]:
        """The timeline for the page: steps, rounds, phases and samples as arrays, and for each step
        the indices (`first`) at which its rounds, phases and samples begin."""
        steps, kept = list(self._steps), {bars.step: bars for bars in self._kept()}
        rounds = [one for step in steps for one in step.rounds]
        phases = [one for step in steps for one in step.phases]
        names = sorted({name for name, _, _ in phases})
        detailed = [kept.get(step.step) for step in steps]
        bars = [one for one in detailed if one is not None]
        nums = [0 if one is None else len(one.ids) for one in detailed]
        numbers = {name: number for number, name in enumerate(names)}
        return {
            "kinds": KINDS,
            "outcomes": OUTCOMES,
            "names": names,
            "step": np.array([step.step for step in steps], np.int32),
            "start": np.array([step.start_s for step in steps], np.float64),
            "end": np.array([step.end_s for step in steps], np.float64),
            "rounds": {
                "first": _ends([len(step.rounds) for step in steps]),
                "kind": np.array([one[0] for one in rounds], np.uint8),
                "start": np.array([one[1] for one in rounds], np.float32),
                "end": np.array([one[2] for one in rounds], np.float32),
                "samples": np.array([one[3] for one in rounds], np.int32),
            },
            "phases": {
                "first": _ends([len(step.phases) for step in steps]),
                "name": np.array([numbers[one[0]] for one in phases], np.uint8),
                "start": np.array([one[1] for one in phases], np.float32),
                "end": np.array([one[2] for one in phases], np.float32),
            },
            "bars": {
                "first": _ends(nums),
                "start": np.array([s for one in bars for s in one.start_s], np.float32),
                "end": np.array([s for one in bars for s in one.end_s], np.float32),
                "tokens": np.array([n for one in bars for n in one.tokens], np.int32),
                "outcome": np.array([n for one in bars for n in one.outcome], np.uint8),
                "id": Texts(str(sample) for one in bars for sample in one.ids),
            },
            "num_detailed": len(bars),
        }

    def _kept(self) -> list[_Bars]:
        return [*self._first, *self._longest, *self._last]


def _ends(counts: list[int]) -> np.ndarray[Any, Any]:
    """For consecutive lists of these lengths, the index at which each list begins, and the end."""
    return np.cumsum([0, *counts], dtype=np.uint32)


def _step(step: StepHistory) -> _Step:
    begin, end = step.start_s, step.end_s
    rounds = [
        (
            KINDS.index(str(one.kind)),
            one.start_s - begin,
            (end if one.end_s is None else one.end_s) - begin,
            len(one.samples),
        )
        for one in step.rounds
    ]
    phases = [(one.name, one.start_s - begin, one.end_s - begin) for one in step.phases]
    return _Step(step.step, begin, end, rounds, phases)


def _bars(step: StepHistory) -> _Bars:
    """The bars of a step's samples, ordered by start, and of equal starts the longest first."""
    begin, end = step.start_s, step.end_s
    samples = sorted(
        step.samples.values(),
        key=lambda one: (one.start_s, one.start_s - (end if one.end_s is None else one.end_s)),
    )
    return _Bars(
        step=step.step,
        seconds=end - begin,
        ids=[one.sample for one in samples],
        start_s=[one.start_s - begin for one in samples],
        end_s=[(end if one.end_s is None else one.end_s) - begin for one in samples],
        tokens=[one.num_tokens for one in samples],
        outcome=[OUTCOMES.index(str(one.outcome)) for one in samples],
    )
