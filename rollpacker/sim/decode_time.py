"""How long decode steps take while no sequence joins or leaves an engine, in closed form.

With n running sequences, each step adds n tokens to the KV cache. Up to `flat_tokens` in the cache
a step takes its shortest time, which depends on n alone. Beyond, each step takes a little longer
than the one before, so that the seconds of many steps are a quadratic, which can be inverted.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from rollpacker.sim.latency import StepCost

STEP_TOLERANCE = 1e-6
"""Share of a decode step by which a time may miss the step's end, due to rounding."""

UNLIMITED = 1 << 60
"""Stands for no limit on steps, tokens or sequences: more than any engine reaches."""


class _Beyond(NamedTuple):
    """Times of decode steps that are bound by reading the KV cache, for one number of running
    sequences. With K tokens in the cache a step takes (empty_s + per_cached_token_s * K +
    sequences_s) / speedup seconds: `sequences_s` for sampling, `speedup` due to guessed tokens."""

    empty_s: float
    sequences_s: float
    speedup: float
    growth_s: float
    """Seconds by which each decode step takes longer than the step before."""


class DecodeTimes:
    """Converts a number of an engine's decode steps into seconds, and seconds into steps."""

    __slots__ = ("_beyond", "_cost", "_per_token_s", "flat_s", "flat_tokens")

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._per_token_s = cost.per_cached_token_s
        self.flat_tokens = _flat_tokens(cost)
        """Tokens in the KV cache up to which a decode step takes its shortest time."""
        self.flat_s, self._beyond = _tables(cost)
        """`flat_s[n]` is the shortest time of a decode step with n running sequences, in seconds.
        `extend` makes the list longer."""

    def extend(self, num: int) -> None:
        """Add the times of steps with up to `num` running sequences to `flat_s` and `_beyond`."""
        cost, flat_s = self._cost, self.flat_s
        for n in range(len(flat_s), num + 1):
            speedup = cost.speedup(n)
            flat_s.append(cost.empty_step_s(n) / speedup)
            growth_s = cost.per_cached_token_s * n / speedup
            if cost.knots:
                self._beyond.append(_Beyond(cost.empty_step_s(n), 0.0, speedup, growth_s))
            else:
                sequences_s = cost.per_sequence_s * n
                self._beyond.append(_Beyond(cost.bytes_s, sequences_s, speedup, growth_s))

    def seconds(self, steps: int, num: int, cached: int) -> float:
        """Seconds that `steps` decode steps of `num` sequences take, the first of them with
        `cached` tokens in the KV cache."""
        num_flat = (self.flat_tokens - cached) // num + 1  # steps that take their floor time
        if steps <= num_flat:
            return steps * self.flat_s[num]
        if num_flat < 0:
            num_flat = 0
        empty_s, sequences_s, speedup, growth_s = self._beyond[num]
        read_s = self._per_token_s * (cached + num * num_flat)
        first_s = (empty_s + read_s + sequences_s) / speedup
        rest = steps - num_flat
        return num_flat * self.flat_s[num] + rest * (first_s + growth_s * (rest - 1) / 2)

    def steps_by(self, seconds: float, num: int, cached: int) -> int:
        """Returns the fewest decode steps that take at least `seconds`, for `num` sequences and at
        first `cached` tokens in the KV cache. It is the inverse of the method `seconds`."""
        num_flat = max(0, (self.flat_tokens - cached) // num + 1)
        flat_s = self.flat_s[num]
        if seconds <= num_flat * flat_s:
            return math.ceil(seconds / flat_s - STEP_TOLERANCE)
        seconds -= num_flat * flat_s
        empty_s, sequences_s, speedup, growth_s = self._beyond[num]
        read_s = self._per_token_s * (cached + num * num_flat)
        first_s = (empty_s + read_s + sequences_s) / speedup
        # The positive root r of growth/2 * r**2 + linear * r = seconds, without cancellation.
        linear_s = first_s - growth_s / 2
        root_s = math.sqrt(linear_s * linear_s + 2 * growth_s * seconds)
        return num_flat + math.ceil(2 * seconds / (linear_s + root_s) - STEP_TOLERANCE)


def _flat_tokens(cost: StepCost) -> int:
    """Tokens in the KV cache up to which a decode step takes its shortest time."""
    if not cost.per_cached_token_s:
        return UNLIMITED
    beyond_bytes_s = max(0.0, cost.launch_s - cost.bytes_s)
    return min(UNLIMITED, int(beyond_bytes_s / cost.per_cached_token_s))


@lru_cache(maxsize=64)
def _tables(cost: StepCost) -> tuple[list[float], list[_Beyond]]:
    """Two empty lists, for `flat_s` and `_beyond`, which all engines with this cost share."""
    return [], []
