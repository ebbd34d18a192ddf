"""Letters between jobs, the service and whoever asks it something."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

SERVICE = "service"
"""The service's box. A job's box has the job's name; who asks a question names one of its own."""


ALL = sys.maxsize
"""The number up to which letters are forgotten when nobody will read the box any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """A letter in a box. It is no struct: a mailbox behind ray outlives the service, and one that
    an earlier version has made sends the pickles of a dataclass, which make no struct."""

    number: int
    """Number among the box's letters, 1 or more. Numbers rise in the order in which letters are
    read."""
    sender: str
    kind: str
    """ask, left, committed, beat of a job, and close, to itself (`mailbox_seat.py`); submit,
    cancel, drain, status of who asks the service; grant, stop, and an answer of the question's
    kind, or refused, of the service."""
    facts: Mapping[str, Any]
    """Content of the letter, as values that JSON has."""
    key: str
    """The sender's own key for the letter, which an answer repeats in `about`."""


class Mailbox(Protocol):
    """Boxes of letters, by name, which outlive whoever writes and reads them. All calls may be
    repeated, and come from any thread. They raise `OSError` where the mailbox cannot be reached."""

    @property
    def address(self) -> str:
        """The address by which other processes open the mailbox (`open_mailbox` of its module in
        `MAILBOXES`)."""
        ...

    @property
    def epoch(self) -> str:
        """Name of the mailbox's life. It changes if all letters are lost: who waits for an answer
        then asks again."""
        ...

    def post(self, box: str, sender: str, key: str, kind: str, facts: Mapping[str, Any]) -> None:
        """Put a letter into the box, once for each `key` of its sender."""
        ...

    def read(self, box: str, after: int, within_s: float) -> list[Letter]:
        """Return the letters with higher numbers, as soon as there are any; none after these
        seconds."""
        ...

    def forget(self, box: str, upto: int) -> None:
        """Letters up to this number have been dealt with. `ALL`: the box may go as well."""
        ...
