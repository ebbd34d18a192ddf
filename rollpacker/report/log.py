"""Reads `events.jsonl`. A log whose last line was cut off by a crash is still a log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rollpacker.core.records import Entry, LogError, decode

EVENTS_FILE = "events.jsonl"


class EventLog:
    """The entries of one log, in order; can be iterated more than once.

    Raises `LogError` with file and line for anything that is no entry. Only a last line without its
    newline may be broken: it is left out, and `truncated` tells."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.truncated = False

    def __iter__(self) -> Iterator[Entry]:
        self.truncated = False
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.isspace():
                    continue
                try:
                    entry = decode(line.decode("utf-8"))
                except ValueError as error:
                    if not line.endswith(b"\n"):
                        self.truncated = True
                        return
                    raise LogError(f"{self.path}, line {number}: {error}") from error
                yield entry


def events_path(run: str | Path) -> Path:
    """The event log of a run folder (or the log itself). Raises `ValueError` if there is none."""
    path = Path(run)
    if path.is_file():
        return path
    if not path.is_dir():
        raise ValueError(
            f"{path} does not exist: give the folder of a run, such as runs/quickstart"
        )
    if not (path / EVENTS_FILE).is_file():
        raise ValueError(
            f"{path} holds no {EVENTS_FILE}: give the folder of a run, such as runs/quickstart"
        )
    return path / EVENTS_FILE
