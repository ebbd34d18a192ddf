"""Turns the printed output of a process into log lines, up to a number of bytes per minute."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable

MAX_OUTPUT_BYTES = 64 << 10
"""The most bytes of processes' output that an `OutputQuota` lets into the log per minute."""
_MAX_LINE = 2000
_CHUNK = 1 << 16


class OutputQuota:
    """Lets `MAX_OUTPUT_BYTES` of output pass each minute, and counts the bytes that are dropped."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._minute = clock()
        self._left = MAX_OUTPUT_BYTES
        self.num_dropped = 0

    def take(self, data: bytes) -> bytes:
        """Return the part of `data` that may pass, after a note on bytes dropped earlier."""
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
    """A pipe that a process prints to. Start the process with `writer` as its output, and close
    `writer` here afterwards, since the process has a copy."""

    def __init__(self, quota: OutputQuota, heard: Callable[[str], None]) -> None:
        """`heard` is called with each line that the process prints, as far as `quota` lets it."""
        self._quota, self._heard = quota, heard
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._unfinished = b""
        """The beginning of a printed line whose end has not been read yet."""

    def fileno(self) -> int:
        return self._reader

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let this event loop read from the pipe whenever the process has printed."""
        self._loop = loop
        loop.add_reader(self._reader, self.read)

    def read(self) -> None:
        """Read what the process has printed so far, without waiting."""
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
        """Pass a printed line on to `heard`. Control characters and bytes that are no text become
        escapes, tabs become spaces, and of text that overwrites itself only the last is kept."""
        text = line[:_MAX_LINE].decode(errors="backslashreplace").rstrip()
        text = text.rpartition("\r")[2].expandtabs(4)
        if text.strip():
            self._heard("".join(c if c.isprintable() else repr(c)[1:-1] for c in text))

    def _detach(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None and not loop.is_closed():
            loop.remove_reader(self._reader)

    def close(self) -> None:
        """Read the last output and close the pipe. Further calls do nothing."""
        if self._reader >= 0:
            self.read()
            self._tell(self._unfinished)
            self._detach()
            os.close(self._reader)
            self._reader = -1
