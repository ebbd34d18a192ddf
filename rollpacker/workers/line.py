"""A line to another process carries messages both ways over one socket.

A thread uses `send`, `read` and `receive`, which block. An event loop uses `attach` and `post`,
which do not. A line is used in one of the two ways at a time. This module imports little, since
every child that has a line imports it.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol, TypeVar

from rollpacker.workers.frames import MAX_BYTES, Frames, Message, packed

if TYPE_CHECKING:
    import asyncio

_CHUNK = 1 << 16
LINE_FD = "ROLLPACKER_LINE"
"""Environment variable in which a child finds the descriptor of its side of the line."""


class LineEnded(Exception):
    """Raised if the line's other side hung up, is gone, or sent bytes that are no message."""


class Line:
    """One process's side of a line, a socket on which messages are sent and received."""

    def __init__(self, connection: socket.socket, *, max_bytes: int = MAX_BYTES) -> None:
        self.frames = Frames(max_bytes)
        self._connection = connection
        self._heard: deque[Message] = deque()
        self._unsent = bytearray()
        self._is_flushing = False
        """Whether the event loop will soon send the messages that were posted."""
        self._waits_for_room = False
        self._is_finishing = False
        """Whether the line is to be closed once all posted messages are sent."""
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def pair(cls, *, max_bytes: int = MAX_BYTES) -> tuple[Line, socket.socket]:
        """Return this process's side of a new line, and the other side's socket for a child to
        inherit. `max_bytes`: the most bytes of one message that this side accepts."""
        ours, theirs = socket.socketpair()
        return cls(ours, max_bytes=max_bytes), theirs

    @classmethod
    def inherited(cls, fd: int) -> Line:
        """Return this child's side of its line. The child's own children do not inherit it."""
        os.set_inheritable(fd, False)
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        return self._connection.fileno()

    def released(self) -> socket.socket:
        """Take the socket out of the line, for another protocol. The line is not used any more."""
        assert self._loop is None and not self._heard
        return self._connection

    # -- from a thread --------------------------------------------------------------------

    def send(self, kind: int, number: int = 0, payload: bytes = b"") -> None:
        """Send a message, and wait until the kernel has it all. `kind` is one of `kinds.py`;
        `number` is the call that it belongs to, or 0. Raises `LineEnded`."""
        try:
            self._connection.sendall(packed(kind, number, payload))
        except OSError as error:
            raise LineEnded(str(error)) from None

    def read(self) -> list[Message]:
        """Wait for bytes, and return the messages that they complete. Raises `LineEnded`."""
        try:
            data = self._connection.recv(_CHUNK)
            messages = self.frames.feed(data)
        except BlockingIOError:
            return []
        except (OSError, ValueError) as error:
            raise LineEnded(str(error)) from None
        if not data:
            raise LineEnded("it hung up")
        return messages

    def receive(self, timeout_s: float | None = None) -> Message:
        """Return the next message. Raises `LineEnded`, and `TimeoutError` if none is complete after
        `timeout_s` seconds; None: wait for ever."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._heard:
            if until is not None and not ready([self], until - time.monotonic()):
                raise TimeoutError
            self._heard += self.read()
        return self._heard.popleft()

    # -- in an event loop -----------------------------------------------------------------

    def attach(
        self,
        loop: asyncio.AbstractEventLoop,
        heard: Callable[[Message], None],
        ended: Callable[[], None],
    ) -> None:
        """Let this event loop call `heard` with each message, and `ended` once when the line has
        ended. A `ValueError` raised by `heard` ends the line."""
        self._connection.setblocking(False)
        self._loop = loop
        self._is_flushing = self._waits_for_room = False  # which the last loop may not have come to

        def readable() -> None:
            try:
                for message in self.read():
                    heard(message)
            except (LineEnded, ValueError):
                self.detach()
                ended()

        while self._heard:
            heard(self._heard.popleft())
        loop.add_reader(self.fileno(), readable)

    def post(self, kind: int, number: int = 0, payload: bytes = b"") -> None:
        """From the event loop, do as `send` without waiting. Does nothing on an ended line."""
        self._unsent += packed(kind, number, payload)
        self._flush()

    def post_together(self, kind: int, number: int = 0, payload: bytes = b"") -> None:
        """Send a message (arguments as in `send`) from the event loop without waiting, in one
        system call with all messages that are posted before the loop's next round of callbacks."""
        self._unsent += packed(kind, number, payload)
        if not self._is_flushing and self._loop is not None:
            self._is_flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flushing = False
        if self._loop is None:
            self._unsent.clear()
            return
        try:
            while self._unsent:
                del self._unsent[: self._connection.send(self._unsent)]
        except BlockingIOError:
            self._loop.add_writer(self.fileno(), self._flush)
            self._waits_for_room = True
            return
        except OSError:
            self._unsent.clear()
        if self._waits_for_room:
            self._loop.remove_writer(self.fileno())
            self._waits_for_room = False
        if self._is_finishing:
            self.hang_up()

    def finish(self) -> None:
        """Close the line once all messages posted so far are sent."""
        self._is_finishing = True
        self._flush()

    def detach(self) -> None:
        """Take the line out of its event loop: `heard` and `ended` are not called any more."""
        if self._loop is not None and not self._loop.is_closed() and self._is_flushing:
            self._flush()  # the loop will not come to it
        loop, self._loop = self._loop, None
        if loop is not None and not loop.is_closed():
            loop.remove_reader(self.fileno())
            loop.remove_writer(self.fileno())

    # -- the end --------------------------------------------------------------------------

    def hang_up(self) -> None:
        """End the line for both sides. A thread that waits for a message gets `LineEnded`."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Take the line out of its event loop, and close this side of it."""
        self.detach()
        self._connection.close()


def inherited_line() -> Line | None:
    """Return this process's line if a `Host` has started it; None in any other process."""
    fd = os.environ.pop(LINE_FD, None)  # what this one starts has lines of its own
    return None if fd is None else Line.inherited(int(fd))


class HasFileno(Protocol):
    def fileno(self) -> int: ...


Readable = TypeVar("Readable", bound=HasFileno)


def ready(those: Iterable[Readable], timeout_s: float | None) -> list[Readable]:
    """Wait until some of these (lines or other readers) can be read without blocking, and return
    them; after `timeout_s` seconds none. `timeout_s` None: wait for ever."""
    by_fd = {one.fileno(): one for one in those}
    poll = select.poll()  # `select.select` knows descriptors below 1,024 only
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    wait_ms = None if timeout_s is None else max(timeout_s, 0) * 1000
    return [by_fd[fd] for fd, _ in poll.poll(wait_ms)]
