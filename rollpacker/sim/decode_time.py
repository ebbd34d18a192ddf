"""How long decode steps take while nothing joins or leaves an engine, in closed form.

With n running sequences, each step makes the cache grow by n tokens. Up to `flat_tokens` in the
cache a step takes its floor time, which depends on n alone; beyond, each step takes a little longer
than the one before, so that many of them are a quadratic, which has an inverse.
"""

from __future__ import annotations

import math
from functools import lru_cache

from rollpacker.sim.latency import StepCost

STEP_TOLERANCE = 1e-6
"""Share of a step by which a time may miss a boundary through rounding."""

UNLIMITED = 1 << 60
"""Steps, tokens or sequences: more than any engine sees."""


class DecodeTimes:
    """Seconds of the steps of an engine, and how many steps some seconds are."""

    __slots__ = ("_cost", "flat_s", "flat_tokens")

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self.flat_tokens = _flat_tokens(cost)
        """Cached tokens up to which a step takes its floor time."""
        self.flat_s = _flat_table(cost)
        """Seconds of a step at its floor, by the number of running sequences; see `extend`."""

    def extend(self, num: int) -> None:
        """Fill `flat_s` up to `num` running sequences."""
        cost, flat_s = self._cost, self.flat_s
        for n in range(len(flat_s), num + 1):
            flat_s.append(cost.empty_step_s(n) / cost.speedup(n))

    def seconds(self, steps: int, num: int, cached: int) -> float:
        """Seconds of `steps` steps of `num` sequences, the first with `cached` tokens in the
        cache."""
        num_flat = self._num_flat(num, cached)
        if steps <= num_flat:
            return steps * self.flat_s[num]
        first_s, growth_s = self._beyond_flat(num, cached + num * num_flat)
        rest = steps - num_flat
        return num_flat * self.flat_s[num] + rest * (first_s + growth_s * (rest - 1) / 2)

    def steps_by(self, seconds: float, num: int, cached: int) -> int:
        """The fewest steps that take at least `seconds`: `seconds` the other way round."""
        num_flat = self._num_flat(num, cached)
        flat_s = self.flat_s[num]
        if seconds <= num_flat * flat_s:
            return math.ceil(seconds / flat_s - STEP_TOLERANCE)
        seconds -= num_flat * flat_s
        first_s, growth_s = self._beyond_flat(num, cached + num * num_flat)
        # The positive root r of growth/2 * r**2 + linear * r = seconds, without cancellation.
        linear_s = first_s - growth_s / 2
        root_s = math.sqrt(linear_s * linear_s + 2 * growth_s * seconds)
        return num_flat + math.ceil(2 * seconds / (linear_s + root_s) - STEP_TOLERANCE)

    def _num_flat(self, num: int, cached: int) -> int:
        """Steps from here on that take their floor time."""
        return max(0, (self.flat_tokens - cached) // num + 1)

    def _beyond_flat(self, num: int, cached: int) -> tuple[float, float]:
        """Seconds of a step bound by reading the cache, and how much longer each next one is."""
        cost = self._cost
        speedup = cost.speedup(num)
        step_s = cost.reading_step_s(num, cached)
        return step_s / speedup, cost.per_cached_token_s * num / speedup


def _flat_tokens(cost: StepCost) -> int:
    """Cached tokens up to which a step takes its floor time."""
    if not cost.per_cached_token_s:
        return UNLIMITED
    beyond_bytes_s = max(0.0, cost.launch_s - cost.bytes_s)
    return min(UNLIMITED, int(beyond_bytes_s / cost.per_cached_token_s))


@lru_cache(maxsize=64)
def _flat_table(cost: StepCost) -> list[float]:
    """Shared by all engines of this cost; it grows with the largest of them."""
    return []
