"""Stores the cluster's events on a local disk. The service's state follows from them.

Events are written before their commands are obeyed, together with the number of the last letter
that was dealt with. For the commands a checksum is stored: a service that would have decided
otherwise (another version, other pools) must not go on from here.
"""

from __future__ import annotations

import json
import sqlite3
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import msgspec

from rollpacker.cluster.decide import events
from rollpacker.cluster.seats.mail_file import check_local
from rollpacker.codec import from_plain, to_plain

FORMAT = 3
"""Number of the format of the file of events. Older files can be read, and get this number."""
_OF_PEOPLE = ("Submitted", "Cancelled", "Drained", "Restored", "Grown")
"""Kinds of events that are on disk before a command is answered. If the host crashes, the last
events of other kinds may be lost, but so are the processes that they tell of."""
_TABLES = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS events (
    number INTEGER PRIMARY KEY AUTOINCREMENT, event TEXT, commands INTEGER
);
"""


_EVENTS: dict[str, type[Any]] = {one.__name__: one for one in get_args(events.Event)}


class StoredEvent(msgspec.Struct, frozen=True):
    event: dict[str, Any]
    """The event as JSON values: its kind, its fields and further facts."""
    checksum: int
    """Checksum of the commands that the event led to when it was stored."""


class Position(msgspec.Struct, frozen=True):
    """Place of a letter (message): its number, and the mailbox's epoch (new after a loss)."""

    epoch: str
    number: int


def entry_of(event: events.Event, facts: Mapping[str, Any], commands: object) -> StoredEvent:
    """Return the event in the form in which it is stored. `facts`: further values to store with it.
    `commands`: commands that it led to, for the checksum."""
    plain = {"kind": type(event).__name__, "event": to_plain(event), "facts": dict(facts)}
    return StoredEvent(plain, checksum(commands))


def happened(entry: StoredEvent) -> tuple[events.Event, Mapping[str, Any]]:
    """Return the event that is stored in this form, and the further values stored with it."""
    plain = entry.event
    event: events.Event = from_plain(_EVENTS[plain["kind"]], plain["event"])
    return event, plain["facts"]


def checksum(commands: object) -> int:
    return zlib.crc32(repr(commands).encode())


class Store:
    """The file of a cluster's events. Raises `ValueError` if it is on a network file system or of a
    newer version, and `OSError` if it cannot be read or written."""

    def __init__(self, path: Path) -> None:
        check_local(path.parent)
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._errors():
            self._base = sqlite3.connect(path, timeout=5.0, isolation_level=None)
            self._base.execute("PRAGMA journal_mode = WAL")
            self._base.executescript(_TABLES)
        found = int(self._fact("format", str(FORMAT)))
        if found > FORMAT:
            self._base.close()
            raise ValueError(
                f"{path} was written by a newer version (format {found}, known: {FORMAT}): update "
                "rollpacker, or serve from another folder"
            )
        if found < FORMAT:
            with self._errors():
                self._base.execute("UPDATE facts SET value = ? WHERE name = 'format'", (FORMAT,))
        self.id = self._fact("id", uuid.uuid4().hex)
        """Random name of this cluster, made with the file; keys of its service's letters begin
        so."""
        known = json.loads(self._fact("left_out", "[]"))
        self.left_out = {Position(*one) for one in known}
        """Places of letters (messages) that a service must skip: acting on them failed by a bug."""

    @property
    def position(self) -> Position:
        return Position(self._fact("epoch", ""), int(self._fact("position", "0")))

    def leave_out(self, letter: Position) -> None:
        """Have all later services skip this letter (message), on which a service has failed."""
        self.left_out.add(letter)
        told = json.dumps([[one.epoch, one.number] for one in self.left_out])
        with self._errors():
            self._base.execute("INSERT OR REPLACE INTO facts VALUES ('left_out', ?)", (told,))

    def began_s(self, now_s: float) -> float:
        """Return the Unix time from which events' times are counted: `now_s` if the file is new."""
        return float(self._fact("began_s", repr(now_s)))

    @property
    def num_events(self) -> int:
        with self._errors():
            (number,) = self._base.execute("SELECT max(number) FROM events").fetchone()
        return number or 0

    def written(self, number: int) -> tuple[str, int] | None:
        """Return the stored event of this number as JSON, and its checksum; None without one."""
        query = "SELECT event, commands FROM events WHERE number = ?"
        with self._errors():
            found: tuple[str, int] | None = self._base.execute(query, (number,)).fetchone()
        return found

    def entries(self, after: int = 0) -> Iterator[StoredEvent]:
        """Iterate over the stored events with numbers above `after`, from 1 up."""
        query = "SELECT event, commands FROM events WHERE number > ? ORDER BY number"
        with self._errors():
            for event, commands in self._base.execute(query, (after,)):
                yield StoredEvent(json.loads(event), commands)

    def write(self, entries: Sequence[StoredEvent], position: Position) -> None:
        """Store the events, and the position of the last letter dealt with, all or nothing."""
        rows = [(json.dumps(one.event), one.checksum) for one in entries]
        facts = [("epoch", position.epoch), ("position", str(position.number))]
        is_asked_for = any(one.event["kind"] in _OF_PEOPLE for one in entries)
        with self._errors():
            self._base.execute(f"PRAGMA synchronous = {'FULL' if is_asked_for else 'NORMAL'}")
            self._base.execute("BEGIN IMMEDIATE")
            try:
                self._base.executemany("INSERT INTO events (event, commands) VALUES (?, ?)", rows)
                self._base.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", facts)
                self._base.execute("COMMIT")
            except BaseException:
                if self._base.in_transaction:
                    self._base.execute("ROLLBACK")
                raise

    def close(self) -> None:
        self._base.close()

    def _fact(self, name: str, default: str) -> str:
        """Return the stored value of this name; without one, store `default` and return it."""
        with self._errors():
            self._base.execute("INSERT OR IGNORE INTO facts VALUES (?, ?)", (name, default))
            (value,) = self._base.execute(
                "SELECT value FROM facts WHERE name = ?", (name,)
            ).fetchone()
            return str(value)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise OSError(f"{self.path}: {error}") from error
