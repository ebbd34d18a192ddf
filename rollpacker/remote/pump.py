"""Carries messages between a line and whoever is at its other end on another host."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

from rollpacker.workers.frames import Message
from rollpacker.workers.line import Line, LineEnded


class Pump:
    """Two threads of one line: who does not read holds nobody else up."""

    def __init__(
        self, line: Line, heard: Callable[[Message], None], ended: Callable[[], None]
    ) -> None:
        """`heard` is called with each message that comes over the line, `ended` once after the
        last. The line is closed then."""
        self._line, self._heard, self._ended = line, heard, ended
        self._outgoing: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        threads = [threading.Thread(target=w, daemon=True) for w in (self._listen, self._speak)]
        self._speaking = threads[1]
        for thread in threads:
            thread.start()

    def post(self, message: Message) -> None:
        """Send it after those before."""
        self._outgoing.put(message)

    def finish(self) -> None:
        """Hang up after what was posted."""
        self._outgoing.put(None)

    def hang_up(self) -> None:
        """Hang up at once."""
        self._line.hang_up()

    def _listen(self) -> None:
        with contextlib.suppress(LineEnded):
            while True:
                self._heard(self._line.receive())
        self.finish()
        self._ended()
        self._speaking.join()
        self._line.close()

    def _speak(self) -> None:
        with contextlib.suppress(LineEnded):
            while (message := self._outgoing.get()) is not None:
                self._line.send(*message)
        self._line.hang_up()
