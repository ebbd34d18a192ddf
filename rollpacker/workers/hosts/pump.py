"""Carries messages between a line (socket) on this host and its other end on another host."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rollpacker.workers.frames import Message
from rollpacker.workers.line import Line
from rollpacker.workers.loop import LoopUse


class Pump:
    """Sends and receives the messages of one line. A line whose other side does not read holds up
    no other line. The methods may be called from any thread."""

    def __init__(
        self, line: Line, heard: Callable[[Message], None], ended: Callable[[], None]
    ) -> None:
        """`heard` is called in an event loop with each message from the line, and must not wait.
        `ended` is called once after the last, in a thread that may wait; the line closes."""
        self._line, self._ended = line, ended
        self._ending: asyncio.Future[None] | None = None
        self._use = LoopUse()
        self._use.soon(line.attach, self._use.loop, heard, self._end)

    def post(self, message: Message) -> None:
        """Send a message over the line, after those posted earlier."""
        self._use.soon(self._line.post, *message)

    def finish(self) -> None:
        """Close the line once all messages posted so far are sent."""
        self._use.soon(self._line.finish)

    def hang_up(self) -> None:
        """Close the line at once; messages not sent yet are lost."""
        self._line.hang_up()

    def _end(self) -> None:
        self._line.close()
        self._ending = self._use.loop.run_in_executor(None, self._ended)
        self._ending.add_done_callback(lambda _: self._use.end())
