"""What a factor does where only the order of training changes (`selection=none`).

Rounds are played out on a common token clock: all responses of a round gain a token a step, so a
group is done when its longest remainder is. Prompts and their lengths are drawn from the fitted
`LengthModel` with fixed seeds, the same ones for every factor, so that a choice is a function of
what was observed. Tokens that are carried may come out differently at the rate that the run has
measured; the rest is then drawn anew, as often as the complement rule asks.

Left out, besides what `factor_plan` leaves out: the time of verifying, and that a prefix says more
of the end than its length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator, Philox
from numpy.typing import NDArray

from rollpacker.core.lengths.bins import FloatArray, IntArray
from rollpacker.core.lengths.model import LengthModel
from rollpacker.core.portable import interpolated, log1p, log1ps, total, total_of
from rollpacker.core.rounds.tail_batching import TailBatchingConfig, times

WARM_ROUNDS = 8
"""Played before anything counts: a pool begins without stragglers."""
MIN_ROUNDS = 24
MIN_PROMPTS = 1024
"""Rounds that count bring at least so many groups, or the longest responses are left to chance."""
MAX_REDRAWS = 16
GRID = (1.0, 1.125, 1.25, 1.5, 1.75, 2.0, 2.5)
"""Candidates for the factor."""


@dataclass(frozen=True, slots=True)
class OrderOnly:
    """How deferred prompts are treated."""

    pooled: bool
    carries: bool
    verifies: bool
    complement: bool
    max_deferrals: int

    @classmethod
    def of(cls, tail: TailBatchingConfig) -> OrderOnly:
        return cls(
            pooled=tail.pooled,
            carries=tail.carries,
            verifies=tail.carry != "weighted",
            complement=tail.carry == "exact" and tail.complement,
            max_deferrals=tail.max_deferrals,
        )


@dataclass(frozen=True, slots=True)
class PlayedRounds:
    """What the rounds with one factor came to."""

    longest: FloatArray
    """Decode steps of each."""
    tokens: FloatArray
    """Generated in each."""
    trained: float
    """Tokens trained on ..."""
    own: float
    """... and what the same prompts would have had if nobody selected and no weights changed."""


@dataclass(slots=True)
class _Groups:
    """P prompts with R responses each."""

    classes: IntArray
    """(P,)"""
    own: IntArray
    """(P, R) lengths, drawn first."""
    lengths: IntArray
    """(P, R) lengths as they are now."""
    reached: IntArray
    """(P, R) tokens there are."""
    floors: IntArray
    """(P, R) furthest place where a response was cut off."""
    deferrals: IntArray
    """(P,)"""

    def take(self, rows: IntArray) -> _Groups:
        return _Groups(*(getattr(self, name)[rows] for name in _FIELDS))

    def plus(self, other: _Groups) -> _Groups:
        return _Groups(
            *(np.concatenate([getattr(self, name), getattr(other, name)]) for name in _FIELDS)
        )


_FIELDS = ("classes", "own", "lengths", "reached", "floors", "deferrals")


def play(
    model: LengthModel,
    order: OrderOnly,
    factor: float,
    *,
    prompts_per_step: int,
    samples_per_prompt: int,
    mismatch: float = 0.0,
    seed: int = 0,
) -> PlayedRounds:
    """`mismatch`: chance per token and update that a carried token comes out differently."""
    return _Play(model, order, prompts_per_step, samples_per_prompt, mismatch, seed).run(factor)


class _Play:
    def __init__(
        self,
        model: LengthModel,
        order: OrderOnly,
        prompts_per_step: int,
        samples_per_prompt: int,
        mismatch: float,
        seed: int,
    ) -> None:
        self._order = order
        self._needed, self._samples = prompts_per_step, samples_per_prompt
        self._mismatch = mismatch
        self._fresh, self._anew = (Generator(Philox([seed, stream])) for stream in (1, 2))
        weights = model.class_weights / total_of(model.class_weights)
        self._weights = np.cumsum(weights)[:-1]
        densities = model.class_densities / total(model.class_densities)[:, np.newaxis]
        self._below = np.cumsum(densities, axis=1)
        """(M, B) share of a class's responses that end by the end of a bin."""
        self._ends = np.append(model.starts - 1, model.cap).astype(np.float64)
        """(B + 1,) tokens at the ends of the bins."""

    def run(self, factor: float) -> PlayedRounds:
        num_launched = times(factor, self._needed)
        count = max(MIN_ROUNDS, math.ceil(MIN_PROMPTS / self._needed))
        longest, tokens = [], []
        trained = own = 0.0
        waiting = self._draw(0)
        for number in range(WARM_ROUNDS + count):
            groups, num_done, waiting = self._next(waiting, num_launched)
            extra = self._verify(groups)
            steps, done, spent = self._race(groups, extra, num_done)
            waiting = waiting.plus(self._deferred(groups.take(np.flatnonzero(~done)), steps))
            if number >= WARM_ROUNDS:
                longest.append(steps)
                tokens.append(spent)
                trained += float(groups.lengths[done].sum())
                own += float(groups.own[done].sum())
        return PlayedRounds(np.array(longest), np.array(tokens), trained, own)

    def _next(self, waiting: _Groups, num_launched: int) -> tuple[_Groups, int, _Groups]:
        """Groups of the next round, how many must be done, and who goes on waiting."""
        num_waiting = waiting.classes.size
        if self._order.pooled:
            first = np.arange(min(num_waiting, num_launched))
            rest = np.arange(first.size, num_waiting)
            groups = waiting.take(first).plus(self._draw(num_launched - first.size))
            return groups, self._needed, waiting.take(rest)
        if num_waiting >= self._needed:
            first, rest = np.arange(self._needed), np.arange(self._needed, num_waiting)
            return waiting.take(first), self._needed, waiting.take(rest)
        return self._draw(num_launched), self._needed, waiting

    def _race(
        self, groups: _Groups, extra: IntArray, num_done: int
    ) -> tuple[float, NDArray[np.bool_], float]:
        """Steps until so many groups are done, which those are, and tokens generated."""
        ends = groups.lengths - groups.reached + extra
        group_ends = ends.max(axis=1)
        awaited = groups.deferrals >= self._order.max_deferrals
        if not self._order.pooled:
            awaited = np.zeros_like(awaited)
        order = np.lexsort((group_ends, ~awaited))  # those first that the round awaits
        winners = order[:num_done]
        steps = int(group_ends[winners].max())
        done = np.zeros(group_ends.size, dtype=np.bool_)
        done[winners] = True
        return float(steps), done, float(np.minimum(ends, steps).sum())

    def _verify(self, groups: _Groups) -> IntArray:
        """Draw carried tokens again; (P, R) tokens generated for ends that are not taken."""
        extra = np.zeros_like(groups.lengths)
        before = groups.reached.copy()
        if not self._order.carries:
            groups.reached[:] = 0
        if not (self._mismatch and self._order.verifies and before.any()):
            return extra
        luck = self._anew.random(before.shape)
        per_token = log1p(-min(self._mismatch, 1 - 1e-12))
        first = (log1ps(-luck) / per_token).astype(np.int64)
        rows, places = np.nonzero(first < before)
        if not rows.size:
            return extra
        kept, classes = first[rows, places], groups.classes[rows]
        floors, ceilings = np.zeros_like(kept), np.full_like(kept, np.iinfo(np.int64).max)
        if self._order.complement:
            floors = groups.floors[rows, places]
            furthest = np.where(groups.floors > 0, groups.floors, before).max(axis=1)
            ceilings = np.where(floors > 0, ceilings, furthest[rows])
        lengths = self._beyond(classes, kept)
        wasted = np.zeros_like(lengths)
        for _ in range(MAX_REDRAWS):
            wrong = np.flatnonzero((lengths <= floors) | (lengths > ceilings))
            if not wrong.size:
                break
            wasted[wrong] += np.minimum(lengths[wrong], ceilings[wrong]) - kept[wrong]
            lengths[wrong] = self._beyond(classes[wrong], kept[wrong])
        groups.lengths[rows, places] = lengths
        if self._order.carries:
            groups.reached[rows, places] = kept
            extra[rows, places] = wasted
        return extra

    def _deferred(self, groups: _Groups, steps: float) -> _Groups:
        """As they are after so many steps. What was wasted on the way is not looked at."""
        groups.reached = np.minimum(groups.lengths, groups.reached + int(steps))
        cut = np.where(groups.reached < groups.lengths, groups.reached, 0)
        groups.floors = np.maximum(groups.floors, cut)
        groups.deferrals = groups.deferrals + 1
        return groups

    # -- draws -------------------------------------------------------------------------

    def _draw(self, count: int) -> _Groups:
        classes = np.searchsorted(self._weights, self._fresh.random(count), side="right")
        shape = (count, self._samples)
        lengths = self._lengths_at(np.repeat(classes, self._samples), self._fresh.random(shape))
        lengths = lengths.reshape(shape)
        zeros = np.zeros(shape, dtype=np.int64)
        return _Groups(
            classes=classes,
            own=lengths,
            lengths=lengths.copy(),
            reached=zeros,
            floors=zeros.copy(),
            deferrals=np.zeros(count, dtype=np.int64),
        )

    def _beyond(self, classes: IntArray, kept: IntArray) -> IntArray:
        """Lengths of responses of which so many tokens are kept."""
        shares = np.empty(kept.shape)
        for m in np.unique(classes):
            own = classes == m
            known = interpolated(kept[own], self._ends[1:], self._below[m], below=0.0)
            shares[own] = known
        lengths = self._lengths_at(classes, shares + (1 - shares) * self._anew.random(kept.shape))
        return np.maximum(lengths, kept + 1)

    def _lengths_at(self, classes: IntArray, ranks: FloatArray) -> IntArray:
        """Lengths at these ranks of their classes; uniform inside a bin."""
        ranks = ranks.ravel()
        found = np.empty(ranks.size, dtype=np.int64)
        for m in np.unique(classes):
            own = classes == m
            shares = np.append(0.0, self._below[m])
            found[own] = np.ceil(interpolated(ranks[own], shares, self._ends)).astype(np.int64)
        return np.maximum(found, 1)
