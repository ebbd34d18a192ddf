"""A line to another process: messages both ways over one socket.

A thread uses `send`, `read` and `receive`, which block. An event loop uses `attach` and `post`,
which do not. A line is used in one of the two ways at a time.
Light: a child that has a line imports no more than it must.
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

from rollpacker.processes.frames import MAX_BYTES, Frames, Message, packed

if TYPE_CHECKING:
    import asyncio

_CHUNK = 1 << 16


class LineEnded(Exception):
    """The other side hung up, is gone, or sent what is no message."""


class Line:
    """One side of it."""

    def __init__(self, connection: socket.socket, *, max_bytes: int = MAX_BYTES) -> None:
        self.frames = Frames(max_bytes)
        self._connection = connection
        self._heard: deque[Message] = deque()
        self._unsent = bytearray()
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def pair(cls) -> tuple[Line, socket.socket]:
        """This process's side, and the other one for a child to inherit."""
        ours, theirs = socket.socketpair()
        return cls(ours), theirs

    @classmethod
    def inherited(cls, fd: int) -> Line:
        """A child's side. The child's own children do not get it."""
        os.set_inheritable(fd, False)
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        return self._connection.fileno()

    # -- from a thread --------------------------------------------------------------------

    def send(self, kind: int, number: int = 0, payload: bytes = b"") -> None:
        """Wait until all of it is on its way. Raises `LineEnded`."""
        try:
            self._connection.sendall(packed(kind, number, payload))
        except OSError as error:
            raise LineEnded(str(error)) from None

    def read(self) -> list[Message]:
        """Wait for some bytes; the messages that are complete with them. Raises `LineEnded`."""
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
        """The next message. Raises `LineEnded`, and `TimeoutError` if none is complete by then."""
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
        """Let this loop, and none before it, hear what the other side says, and once that it has
        ended. A `ValueError` of `heard` ends it."""
        self._connection.setblocking(False)
        self._loop = loop

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
        """Send it as the other side reads. That it has ended is told by `attach`."""
        self._unsent += packed(kind, number, payload)
        self._flush()

    def _flush(self) -> None:
        if self._loop is None:
            self._unsent.clear()
            return
        try:
            while self._unsent:
                del self._unsent[: self._connection.send(self._unsent)]
        except BlockingIOError:
            self._loop.add_writer(self.fileno(), self._flush)
            return
        except OSError:
            self._unsent.clear()
        self._loop.remove_writer(self.fileno())

    def detach(self) -> None:
        """The loop hears no more of it. Idempotent."""
        loop, self._loop = self._loop, None
        if loop is not None and not loop.is_closed():
            loop.remove_reader(self.fileno())
            loop.remove_writer(self.fileno())

    # -- the end --------------------------------------------------------------------------

    def hang_up(self) -> None:
        """Both sides see the end, and so does a thread of ours that waits for it. Idempotent."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Idempotent."""
        self.detach()
        self._connection.close()


class HasFileno(Protocol):
    def fileno(self) -> int: ...


Readable = TypeVar("Readable", bound=HasFileno)


def ready(those: Iterable[Readable], timeout_s: float | None) -> list[Readable]:
    """Which of them can be read without waiting, as soon as there is one, or none in time."""
    by_fd = {one.fileno(): one for one in those}
    poll = select.poll()  # `select.select` knows descriptors below 1,024 only
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    wait_ms = None if timeout_s is None else max(timeout_s, 0) * 1000
    return [by_fd[fd] for fd, _ in poll.poll(wait_ms)]
