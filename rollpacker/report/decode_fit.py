"""Fits constants for the seconds of a decode step (one forward pass for all running samples) to
measured stretches of decode steps. Outliers hardly count, and no constant is negative."""

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
"""Number of sizes of the key-value cache that are tried as the bend: the size above which reading
the cache takes longer than launching the kernels."""
BEND_ROUNDS = 2
"""Number of searches for the bend (see `NUM_BENDS`). The second search gives little weight to the
stretches that the first fit has shown to be outliers."""
CLOSER_LOOKS = 4
"""Number of refinements of a search for the bend, each in the interval around the best so far."""
BEND_GAIN = 0.02
"""Least share by which a bend must lower the fit's loss; else a straight line is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeFit:
    """Constants of generation, in seconds. A decode step of n running samples with K cached
    response tokens takes

        max(launch_s, bytes_s + per_cached_token_s * K) + per_sequence_s * n

    and every sample that is admitted takes per_admitted_s before. The constants include the time
    that the machine lost now and then to disturbances, spread evenly (`stalls`)."""

    launch_s: float = 0.0
    bytes_s: float = 0.0
    per_cached_token_s: float
    per_sequence_s: float = 0.0
    knots: tuple[tuple[float, float], ...] = ()
    """Points (n, seconds of a decode step of n samples with an empty cache), with straight lines
    between and beyond, for an engine that gives several tokens in a step. They replace all
    constants above but `per_cached_token_s`. Empty for other engines."""
    per_admitted_s: float
    """Seconds to prefill a sample that is admitted to the engine."""
    stalls: float
    """Ratio of the measured seconds to those of a machine without disturbances. The constants
    already contain this factor."""
    num_left_out: int
    """Number of stretches of decode steps left out of the fit as outliers. Each took longer than
    the fit predicts by more than half the seconds of a median round of generation."""

    def step_s(self, running: Vector, cached: Vector) -> Vector:
        """Predicted seconds of a decode step for each pair of `running` (number of samples) and
        `cached` (response tokens in the cache)."""
        if self.knots:
            return _table(self.knots, running) + self.per_cached_token_s * cached
        read = np.maximum(self.launch_s, self.bytes_s + self.per_cached_token_s * cached)
        return np.asarray(read + self.per_sequence_s * running)

    def seconds(self, stretches: Sequence[Stretch]) -> Vector:
        """Predicted seconds of each stretch (decode steps with the same samples)."""
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
    """Fit the formula of `DecodeFit` with its `max`, or a straight line without `max` if that is
    nearly as good. `rounds` has, for each round of generation, its stretches of decode steps."""
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
    """Fit the points of `DecodeFit.knots` to whole rounds, for an engine that gives several tokens
    of a sample in a step. Single stretches would be too noisy for that."""
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
    """The matrix of the least-squares fit in `fit_rounds`, with a row for each stretch of decode
    steps. Its columns stand for the seconds of a step of `counts[0]` samples, the further seconds
    at each next of `counts`, cached tokens and admitted samples. No constant is negative, so a step
    never gets shorter with more samples."""
    ramps = [
        table.steps * np.clip((table.running - low) / (high - low), 0, 1)
        for low, high in pairwise(counts)
    ]
    return np.column_stack([table.steps, *ramps, table.beyond(0.0), table.admitted])


class _Stretches:
    """Stretches of decode steps as arrays: one for each field, with an element per stretch."""

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        columns = np.array(stretches, dtype=np.float64).reshape(-1, len(Stretch._fields)).T
        self.steps, self.running, self.cached, self.admitted, self.seconds = columns
        self.sample_steps = self.steps * self.running

    def beyond(self, bend: float) -> Vector:
        """For each stretch, the sum over its decode steps of the cached tokens beyond `bend`."""
        first = np.clip(np.ceil((bend - self.cached) / np.maximum(self.running, 1)), 0, self.steps)
        num = self.steps - first
        growth = self.steps * (self.steps - 1) - first * (first - 1)
        return np.asarray(num * (self.cached - bend) + self.running * growth / 2)


def _best_bend(columns: Callable[[float], Matrix], table: _Stretches, weights: Vector) -> float:
    """The bend (number of cached tokens from which on they slow a decode step down) with the least
    squared error, found by ever closer searches. `weights`: weight of each stretch in the error."""
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
    """Numbers of running samples at which `DecodeFit.knots` has points: powers of two up to `most`,
    and `most` itself (the most samples at once), without a narrow last gap."""
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
