"""Letters between jobs, the service and whoever asks it something."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

SERVICE = "service"
"""The service's box. A job's box has the job's name; who asks a question names one of its own."""


ALL = sys.maxsize
"""To forget letters up to this number: nobody will read the box any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    number: int
    """Of the box's letters, 1 or more; rising in the order in which they are read."""
    sender: str
    kind: str
    """ask, left, committed, beat of a job, and close, to itself (`mailbox_seat.py`); submit,
    cancel, drain, status of who asks the service; grant, stop, and an answer of the question's
    kind, or refused, of the service."""
    facts: Mapping[str, Any]
    """As JSON has it."""
    key: str
    """Its sender's for it; an answer says it in `about`."""


class Mailbox(Protocol):
    """Boxes of letters, by name, which outlive whoever writes and reads them. All calls may be
    repeated, and come from any thread. They raise `OSError` where the mailbox cannot be reached."""

    @property
    def address(self) -> str:
        """By this other processes open it: `open_mailbox` of its module in `MAILBOXES`."""
        ...

    @property
    def epoch(self) -> str:
        """Another one if all letters were lost since: who waits for an answer then asks again."""
        ...

    def post(self, box: str, sender: str, key: str, kind: str, facts: Mapping[str, Any]) -> None:
        """Put a letter into the box, once for each `key` of its sender."""
        ...

    def read(self, box: str, after: int, within_s: float) -> list[Letter]:
        """Those with higher numbers, as soon as there are any; none after these seconds."""
        ...

    def forget(self, box: str, upto: int) -> None:
        """Letters up to this number have been dealt with. `ALL`: the box may go as well."""
        ...
