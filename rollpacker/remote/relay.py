"""Carries messages between lines and whoever is at their other ends on another host."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

from rollpacker.processes.frames import Message
from rollpacker.processes.line import Line


class Relay:
    """One thread of all lines, which waits for none of them: who does not read holds nobody else
    up. Its lines are used in that thread alone (`soon`)."""

    def __init__(self) -> None:
        self._loop = asyncio.SelectorEventLoop()
        self._lines: set[Line] = set()
        self._is_ending = False
        threading.Thread(target=self._work, name="relay", daemon=True).start()

    def soon(self, function: Callable[..., None], *arguments: Any) -> None:
        """From any thread. Call it in this one, after what was to be called before; not at all once
        this thread has ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def attach(
        self, line: Line, heard: Callable[[Message], None], ended: Callable[[], None]
    ) -> None:
        """From any thread. `heard` is called with each message that comes over the line, `ended`
        once after the last. The line is closed then."""
        self.soon(self._attach, line, heard, ended)

    def end(self) -> None:
        """From any thread. This one ends with its last line."""
        self.soon(self._end)

    def _attach(
        self, line: Line, heard: Callable[[Message], None], ended: Callable[[], None]
    ) -> None:
        def over() -> None:
            line.close()
            ended()
            self._lines.remove(line)
            self._stop_if_done()

        self._lines.add(line)
        line.attach(self._loop, heard, over)

    def _end(self) -> None:
        self._is_ending = True
        self._stop_if_done()

    def _stop_if_done(self) -> None:
        if self._is_ending and not self._lines:
            self._loop.stop()

    def _work(self) -> None:
        self._loop.run_forever()
        self._loop.close()
