"""The real clock of a run: the one place where the controller learns what time it is."""

from __future__ import annotations

import time


class RealClock:
    """The real clock of a run, in seconds. After a resume it goes on from the checkpoint's time."""

    def __init__(self, time_s: float) -> None:
        """`time_s`: seconds that the clock shows at first."""
        self._origin = time.perf_counter() - time_s

    def now(self) -> float:
        return time.perf_counter() - self._origin

    def stamp(self) -> float:
        return round(self.now(), 6)
