"""The real clock of a run: the one place where the controller learns what time it is."""

from __future__ import annotations

import time


class RealClock:
    """Clock of a run, in seconds. After a resume it goes on where the checkpoint left it."""

    def __init__(self, time_s: float) -> None:
        """`time_s`: what the clock shows now."""
        self._origin = time.perf_counter() - time_s

    def now(self) -> float:
        return time.perf_counter() - self._origin

    def stamp(self) -> float:
        return round(self.now(), 6)
