"""Turns what a process prints into lines for a log, within a quota."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable

MAX_OUTPUT_BYTES = 64 << 10
"""Number of bytes of output that are kept per minute."""
_MAX_LINE = 2000
_CHUNK = 1 << 16


class OutputQuota:
    """Lets `MAX_OUTPUT_BYTES` pass each minute and counts what exceeds them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._minute = clock()
        self._left = MAX_OUTPUT_BYTES
        self.num_dropped = 0

    def take(self, data: bytes) -> bytes:
        """Return as much of it as may pass, after a word on what was dropped the minute before."""
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
    """A pipe that a process prints to. The process is started with `writer` as its output,
    which is closed here once that has a copy of its own."""

    def __init__(self, quota: OutputQuota, heard: Callable[[str], None]) -> None:
        """`heard` is called with each line."""
        self._quota, self._heard = quota, heard
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._unfinished = b""
        """The beginning of a line whose end is still to come."""

    def fileno(self) -> int:
        return self._reader

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let this loop read whenever something was printed."""
        self._loop = loop
        loop.add_reader(self._reader, self.read)

    def read(self) -> None:
        """Read what is there now, without waiting."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._reader, _CHUNK)
            if not data:
                self._detach()
            *lines, rest = (self._unfinished + self._quota.take(data)).split(b"\n")
            if len(rest) > _MAX_LINE:
                lines, rest = [*lines, rest], b""
            self._unfinished = rest
            for line in lines:
                self._tell(line)

    def _tell(self, line: bytes) -> None:
        """Control characters and bytes that are no text are told as escapes, but tabs are spaces
        and of what was written over itself (a progress bar) only the last is left."""
        text = line[:_MAX_LINE].decode(errors="backslashreplace").rstrip()
        text = text.rpartition("\r")[2].expandtabs(4)
        if text.strip():
            self._heard("".join(c if c.isprintable() else repr(c)[1:-1] for c in text))

    def _detach(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None and not loop.is_closed():
            loop.remove_reader(self._reader)

    def close(self) -> None:
        """Read its last words and close the pipe. Idempotent."""
        if self._reader >= 0:
            self.read()
            self._tell(self._unfinished)
            self._detach()
            os.close(self._reader)
            self._reader = -1
