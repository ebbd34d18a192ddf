"""What a process prints, as whole lines for the log, and no more of it than a quota."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

MAX_OUTPUT_BYTES = 64 << 10
"""That are kept, per minute."""
_MAX_LINE = 2000
_CHUNK = 1 << 16


class OutputQuota:
    """So many bytes a minute; what exceeds them is counted."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._minute = clock()
        self._left = MAX_OUTPUT_BYTES
        self.num_dropped = 0

    def take(self, data: bytes) -> bytes:
        """As much of it as may pass, after a word on what did not pass the minute before."""
        told = b""
        if self._clock() - self._minute >= 60:
            self._minute, self._left = self._clock(), MAX_OUTPUT_BYTES
            if self.num_dropped:
                told = b"\n[%d bytes of output were dropped]\n" % self.num_dropped
                self.num_dropped = 0
        kept = data[: self._left]
        self._left -= len(kept)
        self.num_dropped += len(data) - len(kept)
        return told + kept


class Output:
    """The reading end of a pipe that a process prints to (`writer`, until `started`)."""

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._unfinished = b""
        """The line that it is printing."""

    def fileno(self) -> int:
        return self._reader

    def started(self) -> None:
        """The process has its own copy of `writer`, or never will. Idempotent."""
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def lines(self, quota: OutputQuota, *, last: bool = False) -> list[str] | None:
        """Those that are whole now, fit to be logged; `last`: the unfinished one too. None: there
        will be no more."""
        try:
            data = os.read(self._reader, _CHUNK)
        except OSError:  # nothing at the moment
            data, at_end = b"", False
        else:
            at_end = not data
        *whole, rest = (self._unfinished + quota.take(data)).split(b"\n")
        if last or len(rest) > _MAX_LINE:
            whole, rest = [*whole, rest], b""
        self._unfinished = rest
        shown = [_printable(line) for line in whole]
        return None if at_end and not last else [line for line in shown if line]

    def close(self) -> None:
        """Idempotent."""
        self.started()
        with contextlib.suppress(OSError):
            os.close(self._reader)
        self._reader = -1


def _printable(line: bytes) -> str:
    text = line[:_MAX_LINE].decode(errors="replace").rstrip()
    return "".join(c if c.isprintable() else "\ufffd" for c in text)
