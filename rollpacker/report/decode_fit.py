"""Seconds of a decode step, fitted to stretches of a token clock. Robust, and never negative."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rollpacker.report.token_clock import Stretch

Vector = np.ndarray[tuple[int], np.dtype[np.float64]]
Matrix = np.ndarray[tuple[int, int], np.dtype[np.float64]]

HUBER_SCALES = 2.0
"""A residual counts in full up to so many times the scale of all residuals."""
ITERATIONS = 25
NUM_BENDS = 16
"""Cache sizes that are tried as the place where bytes begin to cost more than the launch."""
BEND_ROUNDS = 2
"""Times that the place is looked for: outliers are others once it is known."""
GOLDEN_SECTIONS = 12
MIN_VARIATION = 0.05
"""Relative spread of the numbers admitted at once that tells an admission from its samples."""
BEND_GAIN = 0.02
"""A bend must lower the loss by this share, else the straight line stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeFit:
    """What generation costs, every constant in seconds. A step over n running samples with K
    cached response tokens takes

        max(launch_s, bytes_s + per_cached_token_s * K) + per_sequence_s * n

    and around the steps there is admission and the end of samples. Constants are of the machine as
    it was: what it lost now and then to others is spread over them (`stalls`)."""

    launch_s: float
    bytes_s: float
    per_cached_token_s: float
    per_sequence_s: float
    knots: tuple[tuple[float, float], ...] = ()
    """Instead of everything but `per_cached_token_s`, if not empty: (n, seconds of a step over n
    samples with nothing cached), straight lines between them and beyond the last."""
    admission_s: float
    """Each time that samples are admitted to the engine."""
    per_admitted_s: float
    """Each sample that is admitted: its prefill."""
    per_ended_s: float
    """Each sample that ends or is stopped: its row is taken out, the controller answers."""
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
        around = (
            self.admission_s * table.admissions
            + self.per_admitted_s * table.admitted
            + self.per_ended_s * table.ended
        )
        if self.knots:
            level = _table(self.knots, table.running) * table.steps
            return np.asarray(level + self.per_cached_token_s * table.cached_sum + around)
        if self.per_cached_token_s > 0:
            bend = (self.launch_s - self.bytes_s) / self.per_cached_token_s
            read = self.launch_s * table.steps + self.per_cached_token_s * table.beyond(bend)
        else:
            read = max(self.launch_s, self.bytes_s) * table.steps
        return np.asarray(read + self.per_sequence_s * table.sample_steps + around)


def fit_line(rounds: Sequence[Sequence[Stretch]], *, full: bool) -> DecodeFit:
    """The form with `max`, or the straight line if the data do not tell the two apart.

    `full` False is for a simulator that knows nothing but decode steps and a prefill per sample:
    `admission_s` and `per_ended_s` are 0, and the rest makes up for it as well as it can.
    """
    table = _Stretches([s for of_round in rounds for s in of_round])
    limit = _stall_limit(rounds)
    around = table.around(full=full)

    def columns(bend: float) -> Matrix:
        read = table.beyond(bend)
        return np.column_stack([table.steps, read, table.sample_steps, around])

    straight = _solve(columns(0.0), table.seconds, limit)
    solution, bend = straight, 0.0
    for _ in range(BEND_ROUNDS):
        bend = _best_bend(columns, table, solution.weights)
        solution = _solve(columns(bend), table.seconds, limit)
    bytes_s = float(solution.x[0] - solution.x[1] * bend)
    if bytes_s < 0 or solution.x[1] == 0 or solution.loss > (1 - BEND_GAIN) * straight.loss:
        solution, bend, bytes_s = straight, 0.0, float(straight.x[0])
    launch_s, cached_s, sequence_s, *rest = (solution.factor * solution.x).tolist()
    bytes_s *= solution.factor
    if bend == 0.0:
        launch_s, bytes_s = (launch_s, 0.0) if cached_s == 0 else (0.0, launch_s)
    return _decode_fit(solution, rest, launch_s, bytes_s, cached_s, sequence_s, ())


def fit_table(rounds: Sequence[Sequence[Stretch]]) -> DecodeFit:
    """A straight line in cached tokens, and a table over running samples that never falls."""
    table = _Stretches([s for of_round in rounds for s in of_round])
    counts = _knots(table)
    columns = _table_columns(table, counts, full=True)
    return _table_fit(_solve(columns, table.seconds, _stall_limit(rounds)), counts)


def fit_rounds(rounds: Sequence[Sequence[Stretch]]) -> DecodeFit:
    """The table, fitted to whole rounds: for an engine that drafts, whose stretches are too noisy
    one by one, as which sample is how far ahead is chance. `admission_s` and `per_ended_s` are
    0."""
    tables = [_Stretches(of_round) for of_round in rounds]
    counts = _knots(_Stretches([s for of_round in rounds for s in of_round]))
    columns = np.array([_table_columns(one, counts, full=False).sum(axis=0) for one in tables])
    seconds = np.array([one.seconds.sum() for one in tables])
    return _table_fit(_solve(columns, seconds, math.inf), counts)


def _table_columns(table: _Stretches, counts: Sequence[int], *, full: bool) -> Matrix:
    """A column for the first of the `counts`, one for each gap between two, then the rest."""
    ramps = [
        table.steps * np.clip((table.running - low) / (high - low), 0, 1)
        for low, high in pairwise(counts)
    ]
    return np.column_stack([table.steps, *ramps, table.cached_sum, table.around(full=full)])


def _table_fit(solution: _Solution, counts: Sequence[int]) -> DecodeFit:
    values = (solution.factor * solution.x).tolist()
    levels = np.cumsum(values[: len(counts)]).tolist()
    knots = tuple(zip(map(float, counts), levels, strict=True))
    cached_s, *rest = values[len(counts) :]
    return _decode_fit(solution, rest, 0.0, 0.0, cached_s, 0.0, knots)


def _decode_fit(
    solution: _Solution,
    around: list[float],
    launch_s: float,
    bytes_s: float,
    cached_s: float,
    sequence_s: float,
    knots: tuple[tuple[float, float], ...],
) -> DecodeFit:
    admission_s, admitted_s, ended_s = around
    return DecodeFit(
        launch_s=launch_s,
        bytes_s=bytes_s,
        per_cached_token_s=cached_s,
        per_sequence_s=sequence_s,
        knots=knots,
        admission_s=admission_s,
        per_admitted_s=admitted_s,
        per_ended_s=ended_s,
        stalls=solution.factor,
        num_left_out=solution.num_left_out,
    )


class _Stretches:
    """Columns over stretches."""

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        columns = np.array(stretches, dtype=np.float64).reshape(-1, len(Stretch._fields)).T
        self.steps, self.running, self.cached, self.admitted, self.ended, self.seconds = columns
        self.admissions = (self.admitted > 0).astype(np.float64)
        self.sample_steps = self.steps * self.running
        self.cached_sum = self.beyond(0.0)

    def beyond(self, bend: float) -> Vector:
        """Cached tokens beyond `bend`, added up over each stretch's steps."""
        first = np.clip(np.ceil((bend - self.cached) / np.maximum(self.running, 1)), 0, self.steps)
        num = self.steps - first
        growth = self.steps * (self.steps - 1) - first * (first - 1)
        return np.asarray(num * (self.cached - bend) + self.running * growth / 2)

    def around(self, *, full: bool) -> Matrix:
        """Columns of admissions, admitted samples and ends. Where as many samples are admitted each
        time, what an admission costs by itself cannot be told: all of it goes to the samples."""
        some = self.admitted[self.admitted > 0]
        vary = full and np.std(some) > MIN_VARIATION * np.mean(some)
        return np.column_stack([self.admissions * vary, self.admitted, self.ended * full])


@dataclass(frozen=True, slots=True)
class _Solution:
    x: Vector
    weights: Vector
    loss: float
    factor: float
    num_left_out: int


def _solve(columns: Matrix, seconds: Vector, limit: float) -> _Solution:
    """Non-negative coefficients by iterated re-weighting: relative errors, outliers held down.

    A machine's disturbances only ever make it slower, so what holds them down falls short of the
    mean: `factor` makes up for it, over everything but stalls longer than `limit` seconds."""
    floor = float(np.median(seconds))
    weights = np.ones_like(seconds)
    x = np.zeros(columns.shape[1])
    for _ in range(ITERATIONS):
        old, x = x, nonnegative_least_squares(columns * weights[:, None], seconds * weights)
        predicted = columns @ x
        relative = (predicted + floor) ** -0.5
        errors = np.abs(seconds - predicted) * relative
        scale = HUBER_SCALES * 1.4826 * float(np.median(errors)) + 1e-12
        weights = relative * np.sqrt(np.minimum(1, scale / np.maximum(errors, 1e-300)))
        if np.allclose(x, old, rtol=1e-5, atol=0):
            break
    kept = seconds - predicted <= limit
    loss = float(np.mean(errors[kept]))
    factor = float(seconds[kept].sum() / predicted[kept].sum()) if predicted[kept].any() else 1.0
    return _Solution(x, weights, loss, factor, int((~kept).sum()))


def _best_bend(columns: Callable[[float], Matrix], table: _Stretches, weights: Vector) -> float:
    """The bend of least squares under fixed weights: a coarse look, then golden sections."""

    def loss(bend: float) -> float:
        a = columns(bend) * weights[:, None]
        return float(
            np.sum(
                (
                    table.seconds * weights
                    - a @ nonnegative_least_squares(a, table.seconds * weights)
                )
                ** 2
            )
        )

    bends = np.unique(np.quantile(table.cached, np.linspace(0, 1, NUM_BENDS)))
    losses = [loss(float(bend)) for bend in bends]
    best = int(np.argmin(losses))
    low, high = float(bends[max(best - 1, 0)]), float(bends[min(best + 1, len(bends) - 1)])
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(GOLDEN_SECTIONS):
        left, right = high - golden * (high - low), low + golden * (high - low)
        if loss(left) < loss(right):
            high = right
        else:
            low = left
    return (low + high) / 2


def _stall_limit(rounds: Sequence[Sequence[Stretch]]) -> float:
    """Half the seconds of a typical round."""
    return 0.5 * float(np.median([sum(s.seconds for s in of_round) for of_round in rounds]))


def _knots(table: _Stretches) -> list[int]:
    """Powers of two up to the most that ran at once; the last gap is never a narrow one."""
    most = int(table.running.max())
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


def nonnegative_least_squares(a: Matrix, b: Vector) -> Vector:
    """The x >= 0 that minimises |a x - b|: the active-set method of Lawson and Hanson (1974)."""
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0
    # A triangle of a few rows has the same distances as the many rows of the data.
    triangle = np.asarray(np.linalg.qr(np.column_stack([a / scale, b]), mode="r"))
    a, b = triangle[:, :-1], triangle[:, -1]
    num = a.shape[1]
    x = np.zeros(num)
    free = np.zeros(num, np.bool_)
    tolerance = 1e-10 * float(np.linalg.norm(b) + 1e-300)
    for _ in range(3 * num):
        gradient = a.T @ (b - a @ x)
        gradient[free] = -np.inf
        if free.all() or gradient.max() <= tolerance:
            break
        free[int(gradient.argmax())] = True
        while True:
            best = np.zeros(num)
            best[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            negative = free & (best <= 0)
            if not negative.any():
                break
            share = float(np.min(x[negative] / (x[negative] - best[negative] + 1e-300)))
            x += share * (best - x)
            free &= x > 1e-14
            x[~free] = 0.0
        x = best
    return np.asarray(x / scale)
