"""The adaptive deadline of a check: answers that are right are seldom slow.

A program that hangs holds its worker until its deadline. The longest execution among the correct
answers so far, times a margin, is enough for nearly every answer that deserves a reward:

    timeout = min(max(min_s, factor * longest correct), max_s)

Until the first correct answer it is `max_s`. A correct answer may take up to `factor` times the
longest before it, so the deadline can grow again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rollpacker.bounds import check_at_least, check_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveDeadlineConfig:
    """Settings of the time limit ("deadline") of one kind of check."""

    min_s: float = 2.0
    """Least time limit that a check of this kind is given, in seconds."""
    factor: float = 1.5
    """The deadline is this factor times the longest execution of a correct answer."""
    max_s: float = 30.0
    """Greatest time limit of a check, in seconds; it holds until an answer was correct."""
    adaptive: bool = True
    """Whether the deadline adapts to what was seen. False: it is always `max_s`."""

    def __post_init__(self) -> None:
        check_positive(self, "min_s")
        check_at_least(self, 1, "factor")
        if not (math.isfinite(self.max_s) and self.max_s >= self.min_s):
            raise ValueError(f"max_s must be at least min_s ({self.min_s}), not {self.max_s}")


class AdaptiveDeadline:
    """Time limit of one kind of check. Report every finished check to `observe`, and read
    `timeout_s` before the next one."""

    def __init__(self, config: AdaptiveDeadlineConfig) -> None:
        self.config = config
        self.anchor_s: float | None = None
        """Seconds of the longest execution of a correct answer. None before the first."""
        self.timeout_s = config.max_s
        """Time limit, in seconds, of a check that is started now."""

    def observe(self, seconds: float, *, correct: bool) -> None:
        """Records how long a check took. `correct`: it found the response correct, in time."""
        assert math.isfinite(seconds) and seconds >= 0
        if correct and (self.anchor_s is None or seconds > self.anchor_s):
            self.set_anchor(seconds)

    def set_anchor(self, seconds: float | None) -> None:
        """Sets `anchor_s`, for example from a checkpoint. None: no answer was correct yet."""
        config = self.config
        self.anchor_s = seconds
        self.timeout_s = config.max_s
        if config.adaptive and seconds is not None:
            self.timeout_s = min(max(config.min_s, config.factor * seconds), config.max_s)
