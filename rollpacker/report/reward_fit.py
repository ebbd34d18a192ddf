"""Verdicts of a run's rewards and the seconds that they took, read from its log, for a simulation
of the same rewards.

    checks   the verdict on a response and its seconds, by row of the prompt
    calls    calls of a reward, each of which checks several responses, and how many run at once

A call's seconds are those of its worker, without the wait for a worker. The first calls of a run,
which include imports and filling caches, are kept apart.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rollpacker.report.least_squares import robust_fit
from rollpacker.report.step_history import StepHistory, Verdict

MAX_KEPT_OF_ROW = 64
"""Maximum number of checks that are kept of responses to the prompt of one dataset row."""
MAX_CALLS = 20_000
"""Maximum number of calls of a reward that are kept: the first ones of a run."""
MOST_AT_ONCE = 8
"""Maximum number of calls of a reward that a run has under way (`run/ports/scoring.py`)."""
WORSE = 1.05
"""The number of a reward's workers (calls that run at once) is not in a log. It is the smallest one
whose error, in the predicted times of calls' ends, is at most this multiple of the least error."""
SHORTEST_S = 1e-6
NUM_FIRST = 8
"""Number of a run's first calls of a reward that may be `Calls.warm_ups` (slow first calls)."""
WARM_UP = 2.0
"""A first call is a warm-up if it took more than this many times as long as any later one."""


class Check(NamedTuple):
    """The verdict on one response, with the seconds that it took."""

    num_tokens: int
    """Number of tokens of the response."""
    seconds: float
    """Seconds of execution that the reward reports, or `held_s` if it reports none."""
    held_s: float
    """Seconds from the start of the check to the verdict, a wait for a worker included."""
    value: float | None
    correct: bool | None
    timed_out: bool
    cause: str


class Call(NamedTuple):
    """A call of a reward, which checks one or more responses."""

    num_samples: int
    seconds: float
    """Seconds during which the call kept a worker busy."""
    alone: bool
    """Whether no response was being generated when the call was made. Beside an engine at work, the
    same call takes longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """A run's calls of a reward, and constants fitted to these that predict seconds."""

    recorded: tuple[Call, ...]
    """The calls, ordered by the number of samples that they check."""
    num_workers: int
    """Number of workers (calls that ran at once) that best explains the times of calls' ends."""
    fixed_s: float
    per_sample_s: float
    """Seconds that each sample adds to a call: n samples take fixed_s + n * per_sample_s."""
    warm_ups: tuple[float, ...] = ()
    """Seconds of calls at the run's start that took much longer than all later calls, as they
    imported modules and filled caches. They are not in `recorded`."""

    def line_s(self, num_samples: int) -> float:
        """Mean seconds of a call that checks `num_samples` samples, never 0."""
        return self.fixed_s + self.per_sample_s * num_samples + 1e-9


class _Batch(NamedTuple):
    asked_s: float
    """Time in seconds at which the last check began of the responses judged in this call."""
    done_s: float
    num_samples: int
    alone: bool


@dataclass(slots=True)
class Checks:
    """Gathers the checks of a log, step by step, and finds which of them were made in one call."""

    by_row: dict[int, list[Check]] = field(default_factory=dict)
    _batches: list[_Batch] = field(default_factory=list)
    _open: tuple[float | None, list[Verdict]] = (None, [])
    """The call whose verdicts are now collected: the seconds that they report (None: not known),
    and its verdicts so far."""
    _rollouts: list[tuple[float, float]] = field(default_factory=list)
    """Start and end in seconds of each round of generation in the current step."""

    def add(self, step: StepHistory) -> None:
        self._rollouts = [(r.start_s, r.end_s or math.inf) for r in step.rounds]
        for verdict in step.checks.verdicts:
            self._gather(verdict)
            known = step.samples.get(verdict.event.sample)
            if known is not None and verdict.asked_s is not None:
                self._keep(verdict, verdict.time_s - verdict.asked_s, known.num_tokens)

    def _keep(self, verdict: Verdict, held_s: float, num_tokens: int) -> None:
        event = verdict.event
        if event.cause not in ("", "sample", "deadline"):
            return
        of_row = self.by_row.setdefault(event.sample.prompt.row, [])
        if len(of_row) < MAX_KEPT_OF_ROW:
            seconds = held_s if event.seconds is None else min(event.seconds, held_s)
            told = (event.value, event.correct, event.timed_out, event.cause)
            of_row.append(Check(num_tokens, seconds, held_s, *told))

    def _gather(self, verdict: Verdict) -> None:
        """Add a verdict to the current call of the reward, or begin another call with it. Verdicts
        of one call report the same seconds, and all their checks began before the call's first
        verdict."""
        seconds, members = self._open
        is_other = verdict.event.seconds is None or verdict.event.seconds != seconds
        asked_s = verdict.asked_s
        if is_other or (members and asked_s is not None and asked_s > members[0].time_s):
            self._close()
            self._open = (verdict.event.seconds, [verdict])
        else:
            members.append(verdict)

    def _close(self) -> None:
        asked = [one.asked_s for one in self._open[1] if one.asked_s is not None]
        if asked and self._open[0] is not None and len(self._batches) < MAX_CALLS:
            asked_s = max(asked)
            alone = not any(begin <= asked_s < end for begin, end in self._rollouts)
            done_s = self._open[1][0].time_s
            self._batches.append(_Batch(asked_s, done_s, len(asked), alone))
        self._open = (None, [])

    def calls(self) -> Calls | None:
        """The log's calls of rewards, with the number of workers that explains their ends best.
        None if there were no calls."""
        self._close()
        batches = sorted(self._batches)
        if not batches:
            return None
        found = [_with_workers(batches, num) for num in range(1, MOST_AT_ONCE + 1)]
        least = min(error for _, error in found)
        return next(calls for calls, error in found if error <= WORSE * least)


def _with_workers(batches: Sequence[_Batch], num_workers: int) -> tuple[Calls, float]:
    """The reward's calls with their seconds, if `num_workers` of them ran at once. Also returns the
    mean difference in seconds between the predicted and the logged ends of calls."""
    free = [-np.inf] * num_workers
    recorded = []
    for batch in batches:
        began_s = max(batch.asked_s, free[0])
        heapq.heapreplace(free, max(batch.done_s, free[0]))
        seconds = max(SHORTEST_S, batch.done_s - began_s)
        recorded.append(Call(batch.num_samples, seconds, batch.alone))
    later_s = max((call.seconds for call in recorded[NUM_FIRST:]), default=np.inf)
    warm_ups = [c for c in recorded[:NUM_FIRST] if c.seconds > WARM_UP * later_s]
    recorded = [call for call in recorded if call not in warm_ups]
    counts, taken_s, _ = np.array(recorded, dtype=np.float64).T
    fixed_s, per_sample_s = robust_fit(
        np.column_stack([np.ones_like(counts), counts]), taken_s
    ).constants
    errors, free = [], [-np.inf] * num_workers
    for batch in batches:
        done_s = max(batch.asked_s, free[0]) + fixed_s + per_sample_s * batch.num_samples
        heapq.heapreplace(free, done_s)
        errors.append(abs(done_s - batch.done_s))
    return (
        Calls(
            recorded=tuple(sorted(recorded)),
            num_workers=num_workers,
            fixed_s=fixed_s,
            per_sample_s=per_sample_s,
            warm_ups=tuple(call.seconds for call in warm_ups),
        ),
        float(np.mean(errors)),
    )
