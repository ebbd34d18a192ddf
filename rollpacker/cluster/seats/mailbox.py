"""Messages (*letters*) between jobs, the cluster's service and the commands that ask it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

SERVICE = "service"
"""Name of the box of letters (messages) to the service. A job's box has the job's name."""


ALL = sys.maxsize
"""Value for `forget` in place of a letter's number: remove all letters, of a box out of use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """A message in a box. It is a dataclass and no msgspec struct, since a mailbox on ray may have
    been made by an earlier version, which sends pickled dataclasses."""

    number: int
    """Number of the letter in its box, from 1 up. Letters are read in this order."""
    sender: str
    kind: str
    """What the letter is about, in a word. A job sends ask, left, committed or beat (and close to
    itself, `mailbox_seat.py`). A command sends submit, cancel, drain or status. The service sends
    grant or stop to a job; its answer to a command has the command's word, or is refused."""
    facts: Mapping[str, Any]
    """Content of the letter (message) by name, as JSON values."""
    key: str
    """Name of the letter, which its sender uses once. An answer has it as `about` in its facts."""


class Mailbox(Protocol):
    """Boxes of letters (messages), by name, which outlive their writers and readers. All calls may
    be repeated, in any thread; they raise `OSError` if the mailbox cannot be reached."""

    @property
    def address(self) -> str:
        """Address from which another process opens this mailbox: its kind, and where it is."""
        ...

    @property
    def epoch(self) -> str:
        """Name of the mailbox's present life. It changes when all letters are lost: a process that
        waits for an answer then has to post its question again."""
        ...

    def post(self, box: str, sender: str, key: str, kind: str, facts: Mapping[str, Any]) -> None:
        """Put a letter (message) of this kind and content (`facts`) into the box. A letter whose
        `key` its sender has used before is ignored."""
        ...

    def read(self, box: str, after: int, within_s: float) -> list[Letter]:
        """Return the box's letters with numbers higher than `after` as soon as there are any, or
        none after `within_s` seconds."""
        ...

    def forget(self, box: str, upto: int) -> None:
        """Remove the box's letters up to this number. With `ALL` the box itself may go, too."""
        ...
