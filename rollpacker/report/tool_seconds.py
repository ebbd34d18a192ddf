"""Seconds that the calls of a tool took, in memory that does not grow with the number of calls."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from rollpacker.core.events import ToolCall

_PER_DECADE = 100
"""Calls are counted by classes of seconds. This many classes make up a factor of 10, so that a
class is 2.3 % wide."""
_LEAST_S = 1e-6


@dataclass(slots=True)
class ToolSeconds:
    """Counts of the calls of one tool, and how their seconds are distributed."""

    num: int = 0
    """Number of calls of the tool."""
    num_failed: int = 0
    """Number of calls that raised, were not run, or hung."""
    num_hung: int = 0
    """Number of failed calls that had not ended at the deadline of the environment's answer. Their
    seconds are counted up to the deadline."""
    total_s: float = 0.0
    longest_s: float = 0.0
    _classes: Counter[int] = field(default_factory=Counter)
    """Number of calls that ran, by the class that their seconds fall into (see `_PER_DECADE`)."""

    def take(self, call: ToolCall, *, hung: bool = False) -> None:
        """Count one more call. `hung`: the call had not ended at the deadline of the answer."""
        self.num += 1
        self.num_hung += hung
        self.num_failed += not call.is_well
        if call.seconds is not None:
            self.total_s += call.seconds
            self.longest_s = max(self.longest_s, call.seconds)
            self._classes[math.ceil(_PER_DECADE * math.log10(max(call.seconds, _LEAST_S)))] += 1

    def add(self, other: ToolSeconds) -> None:
        """Add the calls that another step counted."""
        self.num += other.num
        self.num_failed += other.num_failed
        self.num_hung += other.num_hung
        self.total_s += other.total_s
        self.longest_s = max(self.longest_s, other.longest_s)
        self._classes.update(other._classes)

    def quantile(self, share: float) -> float | None:
        """Seconds that this share of the calls did not exceed (or 2.3 % more). None: no calls."""
        left = math.ceil(share * self._classes.total())
        for number, count in sorted(self._classes.items()):
            left -= count
            if left <= 0:
                return min(10 ** (number / _PER_DECADE), self.longest_s)
        return None

    def plain(self) -> dict[str, Any]:
        """The counts and seconds, as a mapping that `summary.json` can hold."""
        num_run = self._classes.total()
        return {
            "calls": self.num,
            "failed": self.num_failed,
            "hung": self.num_hung,
            "mean_s": self.total_s / num_run if num_run else None,
            "p99_s": self.quantile(0.99),
            "longest_s": self.longest_s if num_run else None,
        }
