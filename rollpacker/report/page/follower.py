"""Reads a run's log while the run writes it: new entries are read when a page asks for the run."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from rollpacker.core.records import LogError
from rollpacker.report.log import LogTail
from rollpacker.report.page.run_book import RunBook
from rollpacker.report.page.sample_choice import read_samples
from rollpacker.report.page.time_line import TimeLine

READ_S = 0.5
"""Maximum seconds for which one request for the page reads the log, which may take several."""
MAX_WORK = 0.1
"""Largest share of a processor's time for making a run's page. A page that took a second to make is
made again 10 seconds later at the earliest, however often a browser asks."""
MAX_BARS = 12_000
"""Maximum number of samples in the timeline of a live page, fewer than in a file, since a live page
is sent anew with each step."""


class Follower:
    """Keeps the data of one run's page up to date. Several threads may call its methods at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._generation = 0
        self._begin()

    def _begin(self) -> None:
        """Begin to read the run's log from its start. Raises `ValueError` if there is no log."""
        self._generation += 1
        self._book = RunBook(self.folder)
        self._book.time_line = TimeLine(max_bars=MAX_BARS)
        self._tail = LogTail(self._book.events)
        self._problem = ""
        self._not_before_s = 0.0

    def look(self, version: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Returns the run's current state and the data of its page. The data are None if `version`,
        the page that the caller has, is current, or if it is too early to make the next
        (`MAX_WORK`). Raises `OSError` or `ValueError` if the run is gone."""
        with self._lock:
            if not self._tail.is_same():
                self._begin()
            self._read()
            state = self._state()
            began = time.monotonic()
            if state["version"] == version or (version and began < self._not_before_s):
                return state, None
            self._book.truncated = bool(self._problem)
            page = self._book.plain()
            now = time.monotonic()
            self._not_before_s = now + (now - began) / MAX_WORK
            return state, page

    def samples(self) -> dict[str, Any]:
        return read_samples(self.folder)

    def _read(self) -> None:
        if self._problem:
            return
        try:
            for entry in self._tail.read(READ_S):
                self._book.feed(entry)
        except LogError as error:
            self._problem = str(error)

    def _state(self) -> dict[str, Any]:
        book = self._book
        history = book.summary.accounting.history
        size = max(1, book.events.stat().st_size)
        version = f"{self._generation}.{book.num_steps}.{book.num_evaluations}.{history.finish}"
        return {
            "version": version,
            "phase": history.phase,
            "step": history.last_step,
            "live": len(history.live),
            "read": min(1.0, self._tail.num_bytes / size),
            "problem": self._problem,
            "quiet_s": book.quiet_s(),
        }
