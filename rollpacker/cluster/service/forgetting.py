"""What the service has no more use for: letters that it dealt with, and boxes that nobody reads."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from rollpacker.cluster.seats.mailbox import ALL, SERVICE, Mailbox

FORGET_S = 1.0
ANSWER_S = 86_400.0
"""Who was answered last so long ago asks nothing more."""


class Forgetting:
    """Lets the mailbox forget it, now and then. A service that is new does not know whom an earlier
    one has answered; of jobs it knows."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._forgot_s = -math.inf
        self._answered_s: dict[str, float] = {}
        """When each box of a question had its last answer."""
        self._emptied: set[str] = set()
        """Of jobs that have ended."""

    def answered(self, box: str) -> None:
        self._answered_s[box] = time.monotonic()

    def is_due(self) -> bool:
        return time.monotonic() - self._forgot_s > FORGET_S

    def forget(self, upto: int, ended: Iterable[str]) -> None:
        """`upto`: of the service's letters. `ended`: the jobs of which no process is left. Raises
        `OSError`."""
        now_s = time.monotonic()
        self._mailbox.forget(SERVICE, upto)
        names = set(ended)
        self._emptied &= names  # the others were submitted once more
        for name in sorted(names - self._emptied):
            self._mailbox.forget(name, ALL)
            self._emptied.add(name)
        for box in [box for box, at_s in self._answered_s.items() if now_s - at_s > ANSWER_S]:
            self._mailbox.forget(box, ALL)
            del self._answered_s[box]
        self._forgot_s = now_s
