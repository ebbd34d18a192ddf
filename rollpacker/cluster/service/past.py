"""Keeps the history of a cluster, and computes the state that follows from it.

FOLDER/events.db has all events (`store.py`), and the state is their replay. FOLDER/snapshot has the
pickled state after one of the events, that event's number, and a digest. It is a cache, which may
be deleted at any time: with it a new service replays only later events. The digest covers the state
and all that it depends on: the code that decides, the cluster as it began, and the event in its
store. If any of these differ, all events are replayed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rollpacker.cluster.decide import cluster as core
from rollpacker.cluster.service import book
from rollpacker.cluster.service.store import Position, Store, StoredEvent, checksum, happened
from rollpacker.core import ids

EVERY = 10_000
"""Number of events between two snapshots of the state. Replaying so many takes a second or two."""
_NAME = "snapshot"
logger = logging.getLogger(__name__)


class Replayed(NamedTuple):
    """The state of the cluster, and of the service's records of jobs, after an event."""

    cluster: core.Cluster
    book: book.Book
    last_s: float
    """Time in seconds of the last event, or of a later snapshot. New events are later still."""


class Past:
    """The stored history of a cluster: all events, and a snapshot of the state to begin from."""

    def __init__(self, folder: Path, cluster: core.Cluster) -> None:
        """`cluster`: the cluster as it was before all events. Raises `ValueError` and `OSError` as
        `Store` does if it cannot read the events."""
        self.store = Store(folder / "events.db")
        self._path = folder / _NAME
        self._origin = _digest_of_code() + pickle.dumps(cluster)
        self._began = Replayed(cluster, book.Book(), 0.0)
        self._number = 0
        """Number of the event after which the snapshot was taken. 0 without a snapshot."""

    def replay(self) -> Replayed:
        """Return the state after all stored events. Raises `ValueError` if the events lead to other
        commands than when they were stored, and `OSError` if they cannot be read."""
        state = self._read() or self._began
        last_s, behind = state.last_s, self.store.entries(self._number)
        for number, entry in enumerate(behind, start=self._number + 1):
            event, facts = happened(entry)
            commands = state.cluster.handle(event)
            if checksum(commands) != entry.checksum:
                raise ValueError(
                    f"{self.store.path}: event {number} ({entry.event['kind']}) leads to something"
                    " else now than when it was written: the cluster's file or the version of "
                    "rollpacker has changed. Serve it as it was until its jobs have ended, or take "
                    "another folder"
                )
            state.book.write(event, facts, commands)
            last_s = event.at_s
        state = state._replace(last_s=last_s)
        self._keep(state)
        return state

    def write(self, entries: Sequence[StoredEvent], position: Position, state: Replayed) -> None:
        """Store new events, with `position`: that of the last letter (message) that needs no more
        work. `state`: the state after these events. Raises `OSError` if that cannot be written."""
        self.store.write(entries, position)
        self._keep(state)

    def _keep(self, state: Replayed) -> None:
        """Save a snapshot of the state if `EVERY` events have come since the last one."""
        number = self.store.num_events
        if number - self._number < EVERY:
            return
        self._number = number  # also if it cannot be written: then it is tried after as many more
        payload = pickle.dumps(state, pickle.HIGHEST_PROTOCOL)
        draft = self._path.with_name(f"{_NAME}.new")
        try:
            draft.write_bytes(b"%d\n%s\n" % (number, self._digest(number, payload)) + payload)
            os.replace(draft, self._path)
        except OSError as error:  # what matters is written
            logger.warning("%s is not kept: %s", self._path, error)

    def _read(self) -> Replayed | None:
        try:
            head, digest, payload = self._path.read_bytes().split(b"\n", 2)
            number = int(head)
        except (OSError, ValueError):
            return None
        if digest != self._digest(number, payload):
            return None
        self._number = number
        state: Replayed = pickle.loads(payload)
        return state

    def _digest(self, number: int, payload: bytes) -> bytes:
        written = repr((self.store.id, number, self.store.written(number)))
        found = hashlib.sha256()
        for part in (self._origin, written.encode(), payload):
            found.update(hashlib.sha256(part).digest())
        return found.hexdigest().encode()


def _digest_of_code() -> bytes:
    """Return a digest of all code on which the state and its stored form depend."""
    found = hashlib.sha256(sys.version.encode())
    rooms = (Path(ids.__file__).parent, Path(core.__file__).parent)
    decides = [path for room in rooms for path in sorted(room.rglob("*.py"))]
    for path in (*decides, Path(book.__file__), Path(__file__)):
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.digest()
