"""Seconds of a decode step, fitted to stretches of a token clock. Robust, and never negative."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rollpacker.report.least_squares import (
    Matrix,
    Vector,
    nonnegative_least_squares,
    robust_fit,
)
from rollpacker.report.token_clock import Stretch

NUM_BENDS = 16
"""Cache sizes that are tried as the place where bytes begin to cost more than the launch."""
BEND_ROUNDS = 2
"""Times that the place is looked for: outliers are others once it is known."""
CLOSER_LOOKS = 4
"""Times that the interval around the best place is divided again, into eighths."""
BEND_GAIN = 0.02
"""A bend must lower the loss by this share, else the straight line stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeFit:
    """Seconds of generation. Every constant is in seconds. A step over n running samples with K
    cached response tokens takes

        max(launch_s, bytes_s + per_cached_token_s * K) + per_sequence_s * n

    and each sample that is admitted takes per_admitted_s before. Constants are of the machine as
    it was: what it lost now and then to others is spread over them (`stalls`)."""

    launch_s: float = 0.0
    bytes_s: float = 0.0
    per_cached_token_s: float
    per_sequence_s: float = 0.0
    knots: tuple[tuple[float, float], ...] = ()
    """Where the engine drafted, instead of all constants above but `per_cached_token_s`: pairs (n,
    seconds of a step over n samples with nothing cached), straight lines between them and beyond
    the last. Else empty."""
    per_admitted_s: float
    """Seconds of each sample that is admitted to the engine: its prefill."""
    stalls: float
    """Seconds that were measured over those of an undisturbed machine: the factor is in the
    constants already."""
    num_left_out: int
    """Stretches that a stall longer than half a typical round fell into: not looked at."""

    def step_s(self, running: Vector, cached: Vector) -> Vector:
        """Seconds of one step, elementwise."""
        if self.knots:
            return _table(self.knots, running) + self.per_cached_token_s * cached
        read = np.maximum(self.launch_s, self.bytes_s + self.per_cached_token_s * cached)
        return np.asarray(read + self.per_sequence_s * running)

    def seconds(self, stretches: Sequence[Stretch]) -> Vector:
        """Predicted seconds of each stretch."""
        table = _Stretches(stretches)
        admitted = self.per_admitted_s * table.admitted
        if self.knots:
            level = _table(self.knots, table.running) * table.steps
            return np.asarray(level + self.per_cached_token_s * table.beyond(0.0) + admitted)
        if self.per_cached_token_s > 0:
            bend = (self.launch_s - self.bytes_s) / self.per_cached_token_s
            read = self.launch_s * table.steps + self.per_cached_token_s * table.beyond(bend)
        else:
            read = max(self.launch_s, self.bytes_s) * table.steps
        return np.asarray(read + self.per_sequence_s * table.sample_steps + admitted)


def fit_line(rounds: Sequence[Sequence[Stretch]]) -> DecodeFit:
    """Fit the form with `max`, or the straight line if the data do not distinguish the two.

    What an admission or the end of a sample costs by itself is not in the form; the other
    constants make up for it as well as they can.
    """
    table = _Stretches([s for of_round in rounds for s in of_round])
    round_s = [sum(s.seconds for s in of_round) for of_round in rounds]
    limit = 0.5 * float(np.median(round_s))

    def columns(bend: float) -> Matrix:
        return np.column_stack(
            [table.steps, table.beyond(bend), table.sample_steps, table.admitted]
        )

    straight = robust_fit(columns(0.0), table.seconds, limit)
    found, bend = straight, 0.0
    for _ in range(BEND_ROUNDS):
        bend = _best_bend(columns, table, found.weights)
        found = robust_fit(columns(bend), table.seconds, limit)
    if (
        found.x[0] < found.x[1] * bend  # `bytes_s` would be negative
        or found.x[1] == 0
        or found.loss > (1 - BEND_GAIN) * straight.loss
    ):
        found, bend = straight, 0.0
    launch_s, cached_s, sequence_s, admitted_s = found.constants
    bytes_s = launch_s - cached_s * bend
    if bend == 0.0:
        launch_s, bytes_s = (launch_s, 0.0) if cached_s == 0 else (0.0, launch_s)
    return DecodeFit(
        launch_s=launch_s,
        bytes_s=bytes_s,
        per_cached_token_s=cached_s,
        per_sequence_s=sequence_s,
        per_admitted_s=admitted_s,
        stalls=found.factor,
        num_left_out=found.num_left_out,
    )


def fit_rounds(rounds: Sequence[Sequence[Stretch]]) -> DecodeFit:
    """Fit a table over the number of running samples to whole rounds: for an engine that drafts,
    whose stretches are too noisy one by one, as which sample is how far ahead is chance."""
    tables = [_Stretches(of_round) for of_round in rounds]
    counts = _knots(max(int(table.running.max()) for table in tables))
    columns = np.array([_table_columns(table, counts).sum(axis=0) for table in tables])
    found = robust_fit(columns, np.array([table.seconds.sum() for table in tables]))
    *levels, cached_s, admitted_s = found.constants
    return DecodeFit(
        per_cached_token_s=cached_s,
        knots=tuple(zip(map(float, counts), np.cumsum(levels).tolist(), strict=True)),
        per_admitted_s=admitted_s,
        stalls=found.factor,
        num_left_out=found.num_left_out,
    )


def _table_columns(table: _Stretches, counts: Sequence[int]) -> Matrix:
    """One column for the first of the `counts`, one for each gap between two of them, then cached
    tokens and admitted samples. The table never falls, as no constant is negative."""
    ramps = [
        table.steps * np.clip((table.running - low) / (high - low), 0, 1)
        for low, high in pairwise(counts)
    ]
    return np.column_stack([table.steps, *ramps, table.beyond(0.0), table.admitted])


class _Stretches:
    """Columns over stretches."""

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        columns = np.array(stretches, dtype=np.float64).reshape(-1, len(Stretch._fields)).T
        self.steps, self.running, self.cached, self.admitted, self.seconds = columns
        self.sample_steps = self.steps * self.running

    def beyond(self, bend: float) -> Vector:
        """Cached tokens beyond `bend`, added up over each stretch's steps."""
        first = np.clip(np.ceil((bend - self.cached) / np.maximum(self.running, 1)), 0, self.steps)
        num = self.steps - first
        growth = self.steps * (self.steps - 1) - first * (first - 1)
        return np.asarray(num * (self.cached - bend) + self.running * growth / 2)


def _best_bend(columns: Callable[[float], Matrix], table: _Stretches, weights: Vector) -> float:
    """The bend of least squares under fixed weights: a coarse look, then closer ones."""
    seconds = table.seconds * weights

    def loss(bend: float) -> float:
        a = columns(bend) * weights[:, None]
        return float(np.sum((seconds - a @ nonnegative_least_squares(a, seconds)) ** 2))

    bends = np.unique(np.quantile(table.cached, np.linspace(0, 1, NUM_BENDS)))
    for _ in range(CLOSER_LOOKS):
        best = int(np.argmin([loss(float(bend)) for bend in bends]))
        low, high = bends[max(best - 1, 0)], bends[min(best + 1, len(bends) - 1)]
        bends = np.linspace(low, high, 9)
    return float((low + high) / 2)


def _knots(most: int) -> list[int]:
    """Powers of two up to the most samples that ran at once; the last gap is never a narrow one."""
    counts = [1]
    while counts[-1] * 2 <= most:
        counts.append(counts[-1] * 2)
    if len(counts) < 2 or most > 1.5 * counts[-1]:
        counts.append(max(most, counts[-1] + 1))
    counts[-1] = max(most, counts[-1])
    return counts


def _table(knots: tuple[tuple[float, float], ...], running: Vector) -> Vector:
    counts, levels = (np.array(column) for column in zip(*knots, strict=True))
    slope = (levels[-1] - levels[-2]) / (counts[-1] - counts[-2])
    beyond = np.maximum(running - counts[-1], 0)
    return np.asarray(np.interp(running, counts, levels) + slope * beyond)
