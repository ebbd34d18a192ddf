"""Reads event logs (`events.jsonl`), also if a crash has cut off the last line."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from rollpacker.core.events import SampleAborted, SampleGenerated, SampleScored
from rollpacker.core.records import Entry, LogError, Note, Session, decode
from rollpacker.did_you_mean import did_you_mean_file

EVENTS_FILE = "events.jsonl"
MAX_COUNT = 1 << 31
MAX_SECONDS = 1e9


class EventLog:
    """The entries of one log, in order; can be iterated more than once.

    Raises `LogError` with file and line for a line that is no entry. Only a last line without its
    newline may be broken: that line is left out, and `truncated` becomes True."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.truncated = False
        self.num_bytes = 0
        """Number of bytes of the file that the current iteration has read."""

    @property
    def share_read(self) -> float:
        return min(1.0, self.num_bytes / max(1, self.path.stat().st_size))

    def __iter__(self) -> Iterator[Entry]:
        self.truncated, self.num_bytes = False, 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                self.num_bytes += len(line)
                if line.isspace():
                    continue
                try:
                    entry = _entry(line)
                except ValueError as error:
                    if not line.endswith(b"\n"):
                        self.truncated = True
                        return
                    raise LogError(f"{self.path}, line {number}: {error}") from error
                yield entry


class LogTail:
    """Reads the entries of a log that still grows: every `read` goes on where the last one stopped.

    A resume cuts the log back and writes on. If that has changed what was read already, `is_same`
    returns False, and another `LogTail` must read the log from its beginning."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.num_bytes = 0
        """Number of bytes of the file that were read so far."""
        self._last = b""
        """The last line that was read."""

    def is_same(self) -> bool:
        """Whether the last line that was read is still at its place in the file. Raises `OSError`
        if the file is gone."""
        with self.path.open("rb") as file:
            file.seek(self.num_bytes - len(self._last))
            return file.read(len(self._last)) == self._last

    def read(self, most_s: float) -> Iterator[Entry]:
        """Yields log entries that were not read yet, for about `most_s` seconds. A last line
        without its newline is still being written and is not read. Raises `LogError` for a line
        that is no entry, and `OSError`."""
        until = time.monotonic() + most_s
        with self.path.open("rb") as file:
            file.seek(self.num_bytes)
            for line in file:
                if not line.endswith(b"\n") or time.monotonic() > until:
                    return
                self.num_bytes += len(line)
                self._last = line
                if line.isspace():
                    continue
                try:
                    yield _entry(line)
                except ValueError as error:
                    raise LogError(f"{self.path}, byte {self.num_bytes}: {error}") from error


def _entry(line: bytes) -> Entry:
    """Returns the log entry of a line. Raises `ValueError` for a line that is no entry, and for
    values that no run writes, since `decode` checks only names and types."""
    entry = decode(line.decode("utf-8"))
    _check_seconds("t", entry.time_s)
    if isinstance(entry, Session):
        if entry.slots is not None and not _is_count(entry.slots, least=1):
            raise LogError(f"slots is {entry.slots!r}, not a whole number from 1 on")
    elif isinstance(entry, Note):
        _check_seconds("seconds", entry.seconds)
    elif isinstance(entry.event, SampleGenerated | SampleAborted):
        if not _is_count(entry.event.num_tokens, least=0):
            raise LogError(f"num_tokens is {entry.event.num_tokens!r}, not a number of tokens")
    elif isinstance(entry.event, SampleScored) and entry.event.seconds is not None:
        _check_seconds("seconds", entry.event.seconds)
    return entry


def _check_seconds(name: str, value: object) -> None:
    if not isinstance(value, int | float) or not abs(value) <= MAX_SECONDS:
        raise LogError(f"{name} is {value!r}, not a number of seconds")


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and least <= value < MAX_COUNT


def events_path(run: str | Path) -> Path:
    """Path of the event log of `run`, which is a run's folder or the log itself. Raises
    `ValueError` if there is no such log."""
    path = Path(run)
    if path.is_file():
        return path
    if not path.is_dir():
        raise ValueError(
            f"{path} does not exist: give the folder of a run, such as runs/quickstart."
            f"{_nearest_run(path)}"
        )
    if not (path / EVENTS_FILE).is_file():
        raise ValueError(
            f"{path} holds no {EVENTS_FILE}: give the folder of a run, such as runs/quickstart"
        )
    return path / EVENTS_FILE


def _nearest_run(path: Path) -> str:
    logs = [log for up in ("", "runs") for log in (path.parent / up).glob(f"*/{EVENTS_FILE}")]
    return did_you_mean_file(path, [log.parent for log in logs])
