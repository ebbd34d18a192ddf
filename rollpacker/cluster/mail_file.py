"""A mailbox in an SQLite file, for jobs and a service on one host.

Writers may be killed at any moment. A reader looks every few milliseconds whether somebody has
written, which costs SQLite a look into shared memory.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollpacker.cluster.local_disk import check_local
from rollpacker.cluster.mailbox import Letter

SCHEME = "file:"
LOOK_S = 0.004
BUSY_S = 2.0
"""So long a call waits for others who write."""
KEEP_S = 900.0
"""Letters that were dealt with are known for so long, so that none comes twice."""

_CURE = ". Remove it, if the host has crashed: what it held is said once more"
_TABLES = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS letters (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    box TEXT, sender TEXT, key TEXT, kind TEXT, facts TEXT, at_s REAL, is_old INTEGER DEFAULT 0,
    UNIQUE (box, sender, key)
);
CREATE INDEX IF NOT EXISTS unread ON letters (box, number) WHERE is_old = 0;
"""


class FileMailbox:
    """Meets `Mailbox`. Raises `ValueError` for a file on a network file system."""

    def __init__(self, path: Path) -> None:
        check_local(path.parent)
        self.path = path.absolute()
        self._own = threading.local()
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._open() as base:
            base.executescript(_TABLES)
            base.execute("INSERT OR IGNORE INTO facts VALUES ('epoch', ?)", (uuid.uuid4().hex,))

    @property
    def address(self) -> str:
        return f"{SCHEME}{self.path}"

    @property
    def epoch(self) -> str:
        with self._open() as base:
            (value,) = base.execute("SELECT value FROM facts WHERE name = 'epoch'").fetchone()
            return str(value)

    def post(self, box: str, sender: str, key: str, kind: str, facts: Mapping[str, Any]) -> None:
        text = json.dumps(facts, allow_nan=False)
        with self._open() as base:
            base.execute(
                "INSERT OR IGNORE INTO letters (box, sender, key, kind, facts, at_s)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                (box, sender, key, kind, text, time.time()),
            )

    def read(self, box: str, after: int, within_s: float) -> list[Letter]:
        until = time.monotonic() + within_s
        seen = None
        while True:
            with self._open() as base:
                (version,) = base.execute("PRAGMA data_version").fetchone()
                found = [] if version == seen else _unread(base, box, after)
            seen = version
            left_s = until - time.monotonic()
            if found or left_s <= 0:
                return found
            time.sleep(min(LOOK_S, left_s))

    def forget(self, box: str, upto: int) -> None:
        with self._open() as base:
            base.execute(
                "UPDATE letters SET is_old = 1, facts = '{}'"
                " WHERE box = ? AND number <= ? AND is_old = 0",
                (box, upto),
            )
            base.execute(
                "DELETE FROM letters WHERE is_old = 1 AND at_s < ?", (time.time() - KEEP_S,)
            )

    def close(self) -> None:
        """This thread's connection."""
        base = getattr(self._own, "base", None)
        if base is not None:
            base.close()
            del self._own.base

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """This thread's connection, in a transaction of its own for each statement."""
        try:
            base = getattr(self._own, "base", None)
            if base is None:
                base = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None)
                base.execute("PRAGMA journal_mode = WAL")
                # A beat must not wait for a disk. Letters outlive all processes, and not the host:
                # nobody who wrote them does either.
                base.execute("PRAGMA synchronous = OFF")
                self._own.base = base
            yield base
        except sqlite3.Error as error:
            self.close()
            cure = "" if isinstance(error, sqlite3.OperationalError) else _CURE
            raise OSError(f"{self.path}: {error}{cure}") from error


def open_mailbox(address: str) -> FileMailbox:
    """The one with this address. Raises `OSError` if there is none."""
    path = Path(address.removeprefix(SCHEME))
    if not path.exists():
        raise OSError(f"there is no mailbox {path}: is the cluster's folder still there?")
    return FileMailbox(path)


def _unread(base: sqlite3.Connection, box: str, after: int) -> list[Letter]:
    rows = base.execute(
        "SELECT number, sender, kind, facts, key FROM letters"
        " WHERE box = ? AND number > ? AND is_old = 0 ORDER BY number",
        (box, after),
    )
    return [
        Letter(number=number, sender=sender, kind=kind, facts=json.loads(facts), key=key)
        for number, sender, kind, facts, key in rows
    ]
