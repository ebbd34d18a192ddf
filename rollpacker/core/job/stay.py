"""How long a round that only waits for its environments stays on the rollout pool.

Once in a step others have the pool anyway: while the job trains. To leave for less than that moves
their turn from there to here, and the job has to wait until it is over. For more it is worth it,
but nobody knows beforehand how long an environment takes. So the job stays for as long as its last
training took, and parking and waking up take besides, and then leaves: whatever the answers take,
no more than twice the seconds are lost than by one who knows them (the rule of whoever rents skis
and may buy them). Short waits, most of all, cost nothing: no engine parks for a quick tool, and the
rows that engines keep between turns stay.

What leaving costs besides: rows that were kept are computed again. A job that has not trained yet,
or not since it was resumed, stays.
"""

from __future__ import annotations

ROUNDING_S = 1e-6
"""Seconds by which an event's time may be too early, since logs round it."""


class Stay:
    """Decides when a job that only waits for environments leaves the rollout pool. All times are
    seconds of the caller's clock."""

    def __init__(self) -> None:
        self.is_over = False
        """True if the round should leave the pool."""
        self._began_s = 0.0
        """When the last training began."""
        self._trained_s: float | None = None
        """Seconds of the last training until the new weights were handed over. None: no
        training."""
        self._switch_s = 0.0
        """Seconds that the engines took to wake up last time."""
        self._due_s: float | None = None
        """When the stay is over. None: the engines have something to do."""
        self._is_reminded = False
        """True if a reminder for the end of the stay is under way."""

    def woke(self, switch_s: float) -> None:
        """Records that the engines woke up, in so many seconds."""
        self._switch_s = switch_s

    def trains(self, now_s: float) -> None:
        """Records that the job has the training pool from now on."""
        self._began_s = now_s

    def trained(self, now_s: float) -> None:
        """Records that the job needs the training pool no more in this step."""
        self._trained_s = now_s - self._began_s

    def reminded(self) -> None:
        """Records that a reminder has come, perhaps before its time: `look` decides anew."""
        self._is_reminded = False

    def look(self, now_s: float, *, rests: bool) -> float | None:
        """Updates `is_over`; called after every event. `rests` is true while the job has the pool
        and all of its samples are with environments. Returns the seconds after which to look again,
        once for each such rest; None if no reminder is needed."""
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
