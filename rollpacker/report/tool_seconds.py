"""Seconds that calls of a tool took, in memory that does not grow with their number."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from rollpacker.core.events import ToolCall

_PER_DECADE = 100
"""Seconds are counted in classes that are 2.3 % wide, and told by their upper ends."""
_LEAST_S = 1e-6


@dataclass(slots=True)
class ToolSeconds:
    """Calls of one tool, and the distribution of their seconds."""

    num: int = 0
    """Calls."""
    num_failed: int = 0
    """Calls that raised, were not run, or hung."""
    num_hung: int = 0
    """Failed calls that had not ended when nobody waited for the answer any longer. Their seconds
    are counted until then."""
    total_s: float = 0.0
    longest_s: float = 0.0
    _classes: Counter[int] = field(default_factory=Counter)
    """Calls that ran, by the logarithm of their seconds."""

    def take(self, call: ToolCall, *, hung: bool = False) -> None:
        """Count one more call."""
        self.num += 1
        self.num_hung += hung
        self.num_failed += not call.is_well
        if call.seconds is not None:
            self.total_s += call.seconds
            self.longest_s = max(self.longest_s, call.seconds)
            self._classes[math.ceil(_PER_DECADE * math.log10(max(call.seconds, _LEAST_S)))] += 1

    def add(self, other: ToolSeconds) -> None:
        """Add the calls of another step."""
        self.num += other.num
        self.num_failed += other.num_failed
        self.num_hung += other.num_hung
        self.total_s += other.total_s
        self.longest_s = max(self.longest_s, other.longest_s)
        self._classes.update(other._classes)

    def quantile(self, share: float) -> float | None:
        """The seconds that this share of the calls that ran did not exceed, to 2.3 %. None: none
        ran."""
        left = math.ceil(share * self._classes.total())
        for number, count in sorted(self._classes.items()):
            left -= count
            if left <= 0:
                return min(10 ** (number / _PER_DECADE), self.longest_s)
        return None

    def plain(self) -> dict[str, Any]:
        """For `summary.json`."""
        num_run = self._classes.total()
        return {
            "calls": self.num,
            "failed": self.num_failed,
            "hung": self.num_hung,
            "mean_s": self.total_s / num_run if num_run else None,
            "p99_s": self.quantile(0.99),
            "longest_s": self.longest_s if num_run else None,
        }
