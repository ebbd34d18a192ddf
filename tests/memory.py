"""What a process has in memory of its own, at its peak."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from rollpacker.workers.child import children


def own_bytes(pid: int) -> int:
    """Bytes of a process, or of the largest that it started, without pages of files, which all
    processes share that map them."""
    try:
        own = Path(f"/proc/{pid}/status").read_text().partition("RssAnon:")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return max([int(own[0]) * 1024 if own else 0, *map(own_bytes, children(pid))])


class Watch:
    """The most that a process has while the body of the `with` runs: `peak_bytes`, looked at every
    millisecond. Without `pid` this process."""

    def __init__(self, pid: int | None = None) -> None:
        self._pid = pid or os.getpid()
        self.first_bytes = self.peak_bytes = own_bytes(self._pid)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.001):
            self.peak_bytes = max(self.peak_bytes, own_bytes(self._pid))
