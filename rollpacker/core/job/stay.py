"""How long a job whose samples all wait for environments keeps the rollout pool that it shares.

Other jobs have the pool in every step anyway, while this one trains. To leave it for a wait shorter
than that gains nothing; for a longer one it is worth it, but nobody knows beforehand how long an
environment takes. So the job stays for as long as its last training took, plus the time to park and
wake up, and then leaves: at most twice the seconds are lost that would be lost with knowledge of
the wait (the ski rental rule). In short waits nothing is parked, and the rows (keys and values)
that engines keep between turns stay.

After leaving, rows that were kept are computed again. A job that has not trained yet, or not since
it was resumed, stays.
"""

from __future__ import annotations

ROUNDING_S = 1e-6
"""Seconds by which an event's time may be too early, since logs round it."""


class Stay:
    """Decides when a job whose samples all wait for environments leaves the rollout pool. All times
    are seconds of the caller's clock."""

    def __init__(self) -> None:
        self.is_over = False
        """True if the job has kept the rollout pool for long enough, and should leave it now."""
        self._began_s = 0.0
        """Time at which the last training began, in seconds."""
        self._trained_s: float | None = None
        """Seconds of the last training, until engines had the new weights. None: there was none."""
        self._switch_s = 0.0
        """Seconds that the engines took to wake up last time."""
        self._due_s: float | None = None
        """Time, in seconds, from which on the job should leave the rollout pool if its samples
        still wait. None: the engines have something to do."""
        self._is_reminded = False
        """True if `look` has asked for a reminder that has not come yet."""

    def woke(self, switch_s: float) -> None:
        """Records that the engines have woken up, and how many seconds that took."""
        self._switch_s = switch_s

    def trains(self, now_s: float) -> None:
        """Records that the job has the training pool from now on."""
        self._began_s = now_s

    def trained(self, now_s: float) -> None:
        """Records that the job needs the training pool no more in this step."""
        self._trained_s = now_s - self._began_s

    def reminded(self) -> None:
        """Records the reminder for which `look` gave the seconds. It may have come early."""
        self._is_reminded = False

    def look(self, now_s: float, *, rests: bool) -> float | None:
        """Updates `is_over`; to be called after every event. `rests`: the job has the rollout pool,
        but all of its samples wait for environments. Returns the seconds after which to call again
        even if no event comes. None: no such call is needed, or it was asked for before."""
        if not rests or self._trained_s is None:
            self._due_s, self.is_over = None, False
            return None
        if self._due_s is None:
            self._due_s = now_s + self._trained_s + 2 * self._switch_s
            self._is_reminded = False
        left_s = self._due_s - now_s
        self.is_over = left_s <= ROUNDING_S
        if self.is_over or self._is_reminded:
            return None
        self._is_reminded = True
        return left_s
