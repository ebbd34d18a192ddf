"""Costs of a sweep through pipeline stages: seconds of each op, and of each message.

A micro-batch's ops take seconds that grow with its tokens, with the pairs of tokens that attend to
each other, and on the last stage with the tokens that are predicted (`Load`). A message (hidden
states down, their gradient up) takes a link's latency plus its bytes over the link's rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rollpacker.core.portable import FloatArray, total
from rollpacker.pipeline.plan.choosers import KINDS, Kind

Direction = Literal["down", "up"]
"""Direction of a message between stages: hidden states go down to the next stage, gradients up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The size of one micro-batch: the numbers on which the time of its ops depends."""

    tokens: int
    pairs: float = 0.0
    """Number of pairs of a token and one that it attends to: half the squared length of each
    row."""
    targets: int = 0
    """Number of tokens that the last stage predicts."""

    @classmethod
    def of(cls, lengths: Sequence[int], num_targets: int | None = None) -> Load:
        """Return the size of a micro-batch of packed rows with these lengths in tokens.
        `num_targets` is the number of predicted tokens; None: all tokens."""
        tokens = sum(lengths)
        pairs = sum(length * length for length in lengths) / 2
        return cls(
            tokens=tokens, pairs=pairs, targets=tokens if num_targets is None else num_targets
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCost:
    """Seconds of one kind of op on one stage, as a linear function of a micro-batch's size."""

    fixed_s: float = 0.0
    per_token_s: float = 0.0
    per_pair_s: float = 0.0
    per_target_s: float = 0.0

    def __call__(self, load: Load) -> float:
        return (
            self.fixed_s
            + self.per_token_s * load.tokens
            + self.per_pair_s * load.pairs
            + self.per_target_s * load.targets
        )


@dataclass(frozen=True, slots=True)
class StageCost:
    """Costs of one stage's three ops: forward (F), backward for inputs (I) and for weights (W)."""

    f: OpCost
    i: OpCost
    w: OpCost

    def of(self, kind: Kind) -> OpCost:
        if kind == "F":
            return self.f
        return self.i if kind == "I" else self.w


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Seconds of ops, tokens and message bytes of N micro-batches once through S stages."""

    f_s: tuple[tuple[float, ...], ...]
    """Seconds of the forward passes, [stage][micro-batch]. `i_s` and `w_s` are those of the
    backward passes for inputs and for weights."""
    i_s: tuple[tuple[float, ...], ...]
    w_s: tuple[tuple[float, ...], ...]
    tokens: tuple[int, ...]
    """Number of tokens of each micro-batch, [N]."""
    message_bytes: tuple[int, ...]
    """Bytes of each micro-batch's hidden states between two stages; its gradients have as many."""

    def __post_init__(self) -> None:
        shapes = {len(row) for table in (self.f_s, self.i_s, self.w_s) for row in table}
        assert shapes <= {len(self.tokens)} and len(self.message_bytes) == len(self.tokens)
        assert len(self.f_s) == len(self.i_s) == len(self.w_s) >= 1

    @classmethod
    def of(
        cls, costs: Sequence[StageCost], loads: Sequence[Load], *, bytes_per_token: float = 0.0
    ) -> Work:
        """Return the work of micro-batches of sizes `loads` on stages with these costs.
        `bytes_per_token`: those of a message."""
        return cls(
            f_s=tuple(tuple(cost.f(load) for load in loads) for cost in costs),
            i_s=tuple(tuple(cost.i(load) for load in loads) for cost in costs),
            w_s=tuple(tuple(cost.w(load) for load in loads) for cost in costs),
            tokens=tuple(load.tokens for load in loads),
            message_bytes=tuple(round(load.tokens * bytes_per_token) for load in loads),
        )

    @classmethod
    def even(
        cls,
        num_micro_batches: int,
        *,
        f_s: Sequence[float],
        i_s: Sequence[float],
        w_s: Sequence[float],
    ) -> Work:
        """Return the work of equal micro-batches, of one token and no bytes each. `f_s`, `i_s` and
        `w_s` are by stage the seconds of one op."""
        count = num_micro_batches
        return cls(
            f_s=tuple((seconds,) * count for seconds in f_s),
            i_s=tuple((seconds,) * count for seconds in i_s),
            w_s=tuple((seconds,) * count for seconds in w_s),
            tokens=(1,) * count,
            message_bytes=(0,) * count,
        )

    @property
    def num_stages(self) -> int:
        return len(self.f_s)

    @property
    def num_micro_batches(self) -> int:
        return len(self.tokens)

    def table(self, kind: Kind) -> tuple[tuple[float, ...], ...]:
        """Return the seconds of each op of this kind, [stage][micro-batch]."""
        if kind == "F":
            return self.f_s
        return self.i_s if kind == "I" else self.w_s

    def stage_s(self, stage: int) -> float:
        """Return the seconds of all ops of all micro-batches on this stage, waits left out."""
        return math.fsum(sum(self.table(kind)[stage]) for kind in KINDS)

    def mean_s(self, kind: Kind) -> list[float]:
        """Return by stage the mean seconds of an op of this kind over the micro-batches."""
        count = max(self.num_micro_batches, 1)
        return [math.fsum(row) / count for row in self.table(kind)]


@dataclass(frozen=True, slots=True)
class Link:
    """A link between two neighbouring stages, each direction for itself: messages leave one after
    the other, at `bytes_per_s`, and arrive `latency_s` after they have left."""

    latency_s: float = 0.0
    bytes_per_s: float = math.inf

    def leaves_s(self, num_bytes: int) -> float:
        """Return the seconds for which a message of this many bytes occupies the link."""
        return num_bytes / self.bytes_per_s

    def seconds(self, num_bytes: int) -> float:
        """Return the seconds from sending to arrival of a message of this size on a free link."""
        return self.latency_s + self.leaves_s(num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds of a pipeline's ops and messages, as measured in its last steps."""

    stages: tuple[StageCost, ...]
    links: tuple[Link, ...]
    """The links by number: link n is between stages n and n + 1."""
    bytes_per_token: float
    """Bytes of a message between two stages per token of its micro-batch."""


LinkAt = Callable[[int, float], Link]
"""A function that returns a link (latency and rate) by its number (0: between stages 0 and 1) and
the second at which a message is sent."""


def constant(links: Sequence[Link]) -> LinkAt:
    """Return a function that gives links by number and time, for links that never change."""
    kept = tuple(links)
    return lambda number, now_s: kept[number]


_TOLD_APART = 0.02
"""Least singular value, of a matrix whose columns (tokens, pairs ...) have length 1, above which a
fit to noisy times can tell the columns apart."""


def fit_op_cost(loads: Sequence[Load], seconds: Sequence[float]) -> OpCost:
    """Return the `OpCost` that explains the measured seconds of micro-batches of these sizes best,
    in relative terms. No part of it is negative. Parts that the loads cannot tell apart (all alike,
    or always in the same proportion) are left at zero, the later ones first. Needs at least one
    measurement."""
    assert len(loads) == len(seconds) >= 1
    columns = np.array([[1.0, x.tokens, x.pairs, x.targets] for x in loads])
    weights = 1.0 / np.maximum(np.asarray(seconds, dtype=float), 1e-9)
    scale = np.maximum(np.abs(columns).max(axis=0), 1e-300)
    scaled, aim = columns / scale * weights[:, None], np.asarray(seconds) * weights
    used = _independent(scaled)
    while True:
        found = _least_squares(scaled[:, used], aim)
        if len(used) == 1 or (found >= 0).all():
            break
        # Dropping the most negative part and solving again ends, and is exact where the truth has
        # no negative part.
        used.pop(int(found.argmin()))
    parts = np.zeros(4)
    parts[used] = np.maximum(found, 0.0) / scale[used]
    return OpCost(
        fixed_s=float(parts[0]),
        per_token_s=float(parts[1]),
        per_pair_s=float(parts[2]),
        per_target_s=float(parts[3]),
    )


def _least_squares(columns: FloatArray, aim: FloatArray) -> FloatArray:
    """Return the factors [K] by which the columns of an [N, K] array must be multiplied for their
    sum to come closest to `aim` [N]. `_independent` must have found the columns independent."""
    units, sizes = _unit_columns(columns)
    found = _solved(_inner_products(units), total(units * aim[:, np.newaxis], 0).tolist())
    if found is None:  # a single column of zeros
        return np.zeros(len(sizes))
    return np.array(found) / sizes


def _unit_columns(columns: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the columns, each divided by its length, and their lengths (1 for zeros)."""
    sizes = np.sqrt(total(columns * columns, 0))
    sizes = np.where(sizes > 0, sizes, 1.0)
    return columns / sizes, sizes


def _inner_products(columns: FloatArray) -> FloatArray:
    """Return `columns.T @ columns`, (K, K), added row by row."""
    return total(columns[:, :, np.newaxis] * columns[:, np.newaxis], 0)


def _solved(matrix: FloatArray, right: Sequence[float]) -> list[float] | None:
    """Return the solution of a symmetric system of equations; None: it is not positive definite."""
    rows = [[*row, last] for row, last in zip(matrix.tolist(), right, strict=True)]
    for number, row in enumerate(rows):
        if not row[number] > 0:
            return None
        for later in rows[number + 1 :]:
            factor = later[number] / row[number]
            later[:] = [value - factor * above for value, above in zip(later, row, strict=True)]
    found = [0.0] * len(rows)
    for number in reversed(range(len(rows))):
        row, rest = rows[number], rows[number][-1]
        for place in range(number + 1, len(rows)):
            rest -= row[place] * found[place]
        found[number] = rest / row[number]
    return found


def _independent(columns: FloatArray) -> list[int]:
    """Return the indices of columns of which none is nearly a sum of multiples of the others."""
    used: list[int] = []
    for number in (1, 0, 2, 3):  # tokens first: they alone explain most
        trial = columns[:, sorted([*used, number])]
        if len(trial) < trial.shape[1]:
            continue
        # The least singular value is above a bound if this difference is positive definite.
        units, _ = _unit_columns(trial)
        products = _inner_products(units) - _TOLD_APART * _TOLD_APART * np.eye(len(units[0]))
        if _solved(products, [0.0] * len(products)) is not None:
            used = sorted([*used, number])
    return used


def fit_stage_cost(
    measured: Mapping[Kind, tuple[Sequence[Load], Sequence[float]]],
) -> StageCost:
    """Return the costs of a stage's ops, fitted to loads and measured seconds by kind of op."""
    f, i, w = (fit_op_cost(*measured[kind]) for kind in KINDS)
    return StageCost(f, i, w)
