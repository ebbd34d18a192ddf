"""Messages (*letters*) between jobs, the cluster's service and commands that ask it something."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

SERVICE = "service"
"""Name of the service's box. A job's box has the job's name; a command makes up a name."""


ALL = sys.maxsize
"""In place of a number, for `forget`: all letters, because the box will not be read any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """A message in a box. It is a dataclass and no struct, since a mailbox on ray outlives the
    service: one that an earlier version has made sends pickled dataclasses."""

    number: int
    """Number of the letter in its box, 1 or more. Letters are read in the order of their
    numbers."""
    sender: str
    kind: str
    """What the letter is about. From a job: ask, left, committed, beat; and close, to itself
    (`mailbox_seat.py`). From a command: submit, cancel, drain, status. From the service: grant,
    stop, and as an answer the question's own kind, or refused."""
    facts: Mapping[str, Any]
    """Content of the letter by name, as JSON values."""
    key: str
    """Key of the letter, unique for its sender. The answer has it as `about`."""


class Mailbox(Protocol):
    """Boxes of letters, by name, which outlive their writers and readers. All calls may be
    repeated, in any thread. They raise `OSError` if the mailbox cannot be reached."""

    @property
    def address(self) -> str:
        """The address by which other processes open the mailbox (`open_mailbox` of its module in
        `MAILBOXES`)."""
        ...

    @property
    def epoch(self) -> str:
        """Name of the mailbox's life. It changes when all letters are lost: a process that waits
        for an answer then has to post its question again."""
        ...

    def post(self, box: str, sender: str, key: str, kind: str, facts: Mapping[str, Any]) -> None:
        """Put a letter into the box, once for each `key` of its sender."""
        ...

    def read(self, box: str, after: int, within_s: float) -> list[Letter]:
        """Return the box's letters with numbers higher than `after` as soon as there are any, or
        none after `within_s` seconds."""
        ...

    def forget(self, box: str, upto: int) -> None:
        """Drop the box's letters up to this number. `ALL`: the box itself may be dropped, too."""
        ...
