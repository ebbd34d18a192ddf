"""Sources of response lengths: laws (distributions) over normal scores, or recorded lengths."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rollpacker.core.portable import (
    exps,
    interpolated,
    logs,
    normal_cdf,
    normal_cdfs,
    normal_quantile,
)
from rollpacker.sim.length_trace import read_trace
from rollpacker.sim.workload_spec import LengthLaw

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

CHUNK = 16
"""Number of responses to one prompt that are drawn at once."""

_STEPS_PER_UNIT = 2048
_MAX_SCORE = 8.0
_SCORES = np.arange(-_MAX_SCORE, _MAX_SCORE + 1e-9, 1 / _STEPS_PER_UNIT)
"""Grid of standard normal scores at which laws of response lengths are tabulated."""


class Lengths(Protocol):
    """Draws lengths of responses to the prompts of one reward stage (one way to check answers)."""

    cap: int
    hard_prompts: float
    hard_prompt_cap_probability: float

    def draw(
        self, ranks: IntArray, attempt: int, chunk: int, u: FloatArray, e: FloatArray
    ) -> IntArray:
        """Returns the tokens of `CHUNK` responses, from index chunk * CHUNK on, to each of N
        prompts: an array (N, CHUNK). `ranks` (N,) are the prompts' numbers within their reward
        stage, `attempt` counts their earlier launches, `u` (N,) and `e` (N, CHUNK) are normal
        numbers of prompts and responses."""

    def beyond(self, rank: int, u: float, tokens: int) -> tuple[float, Callable[[float], int]]:
        """Returns the chance that a response to a prompt is longer than `tokens`, and a function
        from a uniform number in [0, 1) to its length then. `rank` is the prompt's number in its
        stage, `u` its normal number. Hard prompts (responses often run to the cap) are left out."""

    def law(self) -> tuple[IntArray, FloatArray]:
        """All possible lengths in tokens, and their probabilities, without hard prompts, whose
        responses often run to the cap."""


class _TableLengths:
    """Draws lengths from a table, over a grid of normal scores. A response's score is a standard
    normal number, mixed from one of its prompt and one of its own."""

    def __init__(self, table: IntArray, law: LengthLaw, cap: int) -> None:
        self.cap = cap
        self.hard_prompts = law.of_prompts("hard_prompts")
        self.hard_prompt_cap_probability = law.of_prompts("hard_prompt_cap_probability")
        correlation = law.of_prompts("within_prompt_correlation")
        self._shared, self._own = math.sqrt(correlation), math.sqrt(1 - correlation)
        self._table = np.clip(table, 1, cap)

    def draw(
        self, ranks: IntArray, attempt: int, chunk: int, u: FloatArray, e: FloatArray
    ) -> IntArray:
        z = self._shared * u[:, None] + self._own * e
        places = np.rint((z + _MAX_SCORE) * _STEPS_PER_UNIT).astype(np.int64)
        chosen: IntArray = self._table[np.clip(places, 0, self._table.size - 1)]
        return chosen

    def beyond(self, rank: int, u: float, tokens: int) -> tuple[float, Callable[[float], int]]:
        first = int(np.searchsorted(self._table, tokens, side="right"))
        if first == self._table.size:
            return 0.0, lambda luck: tokens + 1
        least_z = (first - 0.5) / _STEPS_PER_UNIT - _MAX_SCORE
        if not self._own:
            length = int(self._table[min(max(_place(u), 0), self._table.size - 1)])
            return float(length > tokens), lambda luck: max(length, tokens + 1)
        chance = normal_cdf((self._shared * u - least_z) / self._own)

        def longer(luck: float) -> int:
            e = -normal_quantile(min(max((1 - luck) * chance, 1e-300), 1 - 1e-16))
            place = _place(self._shared * u + self._own * e)
            return int(self._table[min(max(place, first), self._table.size - 1)])

        return chance, longer

    def law(self) -> tuple[IntArray, FloatArray]:
        edges = _phi(np.concatenate([_SCORES - 0.5 / _STEPS_PER_UNIT, [np.inf]]))
        edges[0] = 0.0
        return self._table, np.diff(edges)


class PoolLengths:
    """Draws lengths from those recorded of each prompt. At a prompt's first launch, its responses
    get its recorded lengths in order; all other responses get one of them at random."""

    hard_prompts = 0.0
    hard_prompt_cap_probability = 0.0

    def __init__(self, pools: Sequence[Sequence[int]], cap: int) -> None:
        if not pools or not all(pools):
            raise ValueError("every prompt needs at least one recorded length, and there is none")
        self.cap = cap
        self._pools = [np.clip(np.asarray(pool, dtype=np.int64), 1, cap) for pool in pools]

    def draw(
        self, ranks: IntArray, attempt: int, chunk: int, u: FloatArray, e: FloatArray
    ) -> IntArray:
        lengths = np.empty(e.shape, dtype=np.int64)
        uniforms = _phi(e)
        for at, rank in enumerate(ranks.tolist()):
            turn, place = divmod(rank, len(self._pools))
            pool = self._pools[place]
            drawn = np.minimum((uniforms[at] * pool.size).astype(np.int64), pool.size - 1)
            lengths[at] = pool[drawn]
            if not turn and not attempt:
                recorded = pool[chunk * CHUNK : (chunk + 1) * CHUNK]
                lengths[at, : recorded.size] = recorded
        return lengths

    def beyond(self, rank: int, u: float, tokens: int) -> tuple[float, Callable[[float], int]]:
        pool = self._pools[rank % len(self._pools)]
        longer = pool[pool > tokens]
        if not longer.size:
            return 0.0, lambda luck: tokens + 1
        return longer.size / pool.size, lambda luck: int(longer[int(luck * longer.size)])

    def law(self) -> tuple[IntArray, FloatArray]:
        share = 1 / len(self._pools)
        weights = [np.full(pool.size, share / pool.size) for pool in self._pools]
        return np.concatenate(self._pools), np.concatenate(weights)


def lengths_of(law: LengthLaw, cap: int) -> Lengths:
    if law.trace is not None:
        trace = read_trace(law.trace)
        if trace.pools:
            return PoolLengths(trace.pools, cap)
        return _TableLengths(_empirical_table(trace.lengths), law, cap)
    assert law.quantile_law is not None
    return _TableLengths(_quantile_table(law.quantile_law), law, cap)


def _place(score: float) -> int:
    """Index on the grid `_SCORES` of the score nearest to this one."""
    return round((score + _MAX_SCORE) * _STEPS_PER_UNIT)


def _quantile_table(quantiles: Mapping[float, int]) -> IntArray:
    """Response tokens at each score of `_SCORES`, between the given quantiles (share of responses:
    tokens) along straight lines of the log of tokens. At share 0 a response has one token."""
    at = sorted(quantiles)
    known = np.append(0.0, logs(np.array([float(quantiles[q]) for q in at])))
    tokens = exps(interpolated(_phi(_SCORES), np.array([0.0, *at]), known))
    table: IntArray = np.rint(tokens).astype(np.int64)
    return table


def _empirical_table(lengths: Sequence[int]) -> IntArray:
    """Response tokens at each score of `_SCORES`: the recorded length at the same quantile."""
    ordered = np.sort(np.asarray(lengths, dtype=np.int64))
    ranks = np.ceil(_phi(_SCORES) * ordered.size).astype(np.int64) - 1
    return ordered[np.clip(ranks, 0, ordered.size - 1)]


@functools.cache
def _phi_table() -> FloatArray:
    return normal_cdfs(_SCORES)


def _phi(scores: FloatArray) -> FloatArray:
    """Standard normal distribution function of each score, with an error of at most 3e-8."""
    return interpolated(scores, _SCORES, _phi_table(), below=0.0, above=1.0)
