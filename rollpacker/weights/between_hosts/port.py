"""A network port at which a host sends weights to other hosts of the run, and their side of it.

    request: token, number of the shipment (version on its way), first byte, end.
    answer: bytes in pieces as they arrive at the sending host, the length before each piece.
        In place of a length comes 0 every `BEAT_S` seconds if there is nothing new, so that silence
        means a lost host; CHANGED (a newer shipment is there) or FAILED: the rest never comes.

Bytes go from memory to the socket and from the socket to memory; no copy of the model is made.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Protocol

from rollpacker.weights.buffer import ALIGNMENT, BufferLayout, StaleWeightsError, opened
from rollpacker.workers.line import Line, LineEnded
from rollpacker.workers.listener import Listener, connect

PIECE_BYTES = 1 << 20
"""The most bytes of weights that are sent in one piece."""
BEAT_S = 1.0
SILENT_S = 5.0
"""Seconds without a byte after which the host that was asked for weights counts as lost."""
UNKNOWN_S = 5.0
"""Seconds for which a request for a shipment (sending of a version) still unknown here waits."""
_REQUEST = struct.Struct(">QQQ")
_LENGTH = struct.Struct(">I")
_FAILED, _CHANGED = 0xFFFFFFFF, 0xFFFFFFFE


@dataclass(frozen=True, slots=True)
class PortAddress:
    """The address at which a host sends weights, and the token that others must show there."""

    host: str
    port: int
    token: bytes = field(repr=False)


class Streamed(Protocol):
    """One version of the weights on this host, complete or still arriving."""

    def open(self) -> IO[bytes]:
        """Open the memory of the weights as a file. Raises `OSError` if it is gone, and
        `StaleWeightsError` if newer weights are in it."""
        ...

    def arrived(self, start: int, end: int, within_s: float) -> int:
        """Return the end of the bytes from `start` that have arrived: at most `end`, and `start` if
        none came in these seconds. Raises `OSError` or `StaleWeightsError` if they never come."""
        ...


@dataclass(frozen=True, slots=True)
class Written:
    """A complete version of the weights, which the trainer has written on this host."""

    layout: BufferLayout
    head: bytes
    """First bytes of the buffer, which change first when a new version is written."""

    def open(self) -> IO[bytes]:
        file = opened(self.layout)
        if file.read(ALIGNMENT) != self.head:
            file.close()
            raise StaleWeightsError
        return file

    def arrived(self, start: int, end: int, within_s: float) -> int:
        return end


class WeightPort:
    """A host's port, at which it sends the newest shipment (version of the weights) on request."""

    def __init__(self, host: str) -> None:
        """Listen on any free port of this address. Raises `OSError` if that is impossible."""
        self._listener = Listener(host)
        self.address = PortAddress(host, self._listener.port, self._listener.token)
        self._changed = threading.Condition()
        self._newest = 0
        self._streamed: Streamed | None = None
        self._is_closed = False
        threading.Thread(target=self._listen, name="weights", daemon=True).start()

    def stream(self, number: int, streamed: Streamed) -> None:
        """From now on, send `streamed` as shipment `number` to hosts that ask for it."""
        with self._changed:
            self._newest, self._streamed = number, streamed
            self._changed.notify_all()

    def close(self) -> None:
        """Accept no more requests for weights. Further calls do nothing."""
        self._is_closed = True

    def _listen(self) -> None:
        while not self._is_closed:
            for line, hello in self._listener.accept(BEAT_S):
                threading.Thread(target=self._answer, args=(line, hello), daemon=True).start()
        self._listener.close()

    def _answer(self, line: Line, hello: bytes) -> None:
        with line.released() as connection, contextlib.suppress(OSError, struct.error):
            connection.settimeout(SILENT_S)
            number, start, end = _REQUEST.unpack(hello)
            connection.sendall(_LENGTH.pack(self._send(connection, number, start, end)))

    def _send(self, connection: socket.socket, number: int, start: int, end: int) -> int:
        """Send bytes `start` to `end` of a shipment once it is known here. Returns 0 at the end, or
        a code if the rest never comes. Raises `OSError` if the connection fails."""
        until = time.monotonic() + UNKNOWN_S
        while time.monotonic() < until:
            with self._changed:
                self._changed.wait_for(lambda: self._newest >= number, BEAT_S)
                streamed, newest = self._streamed, self._newest
            if newest > number:
                return _CHANGED
            if newest == number and streamed is not None:
                return _send(connection, streamed, start, end)
            connection.sendall(_LENGTH.pack(0))
        return _FAILED


def _send(connection: socket.socket, streamed: Streamed, start: int, end: int) -> int:
    """Send bytes `start` to `end` of a version as they arrive here. Returns 0 at the end, or a code
    if the rest never comes. Raises `OSError` if the connection fails."""
    try:
        file = streamed.open()
    except StaleWeightsError:
        return _CHANGED
    except OSError:
        return _FAILED
    with file:
        while start < end:
            try:
                arrived = streamed.arrived(start, min(end, start + PIECE_BYTES), BEAT_S)
            except StaleWeightsError:
                return _CHANGED
            except OSError:
                return _FAILED
            connection.sendall(_LENGTH.pack(arrived - start))
            if arrived > start:
                num_sent = connection.sendfile(file, start, arrived - start)
                assert num_sent == arrived - start, "the memory has all of them"
            start = arrived
    return 0


def take(
    source: PortAddress,
    number: int,
    into: memoryview,
    start: int,
    took: Callable[[int], None],
) -> None:
    """Receive bytes of shipment `number` from position `start` on, until `into` is full. `took` is
    called with the number of bytes so far after each read; its errors end this. Raises `OSError`,
    and `StaleWeightsError` if there are newer weights."""
    num_taken = 0
    request = _REQUEST.pack(number, start, start + len(into))
    try:
        line = connect(source.host, source.port, source.token, request, within_s=SILENT_S)
    except LineEnded as error:
        raise OSError(f"{source.host} hung up: {error}") from error
    with line.released() as connection:
        connection.settimeout(SILENT_S)
        length = bytearray(_LENGTH.size)
        while num_taken < len(into):
            _receive(connection, memoryview(length))
            (size,) = _LENGTH.unpack(length)
            if size == _CHANGED:
                raise StaleWeightsError
            if size > len(into) - num_taken:
                raise OSError(f"{source.host} does not have these weights")
            end = num_taken + size
            took(num_taken)
            while num_taken < end:
                num_taken += _receive_some(connection, into[num_taken:end])
                took(num_taken)


def _receive(connection: socket.socket, into: memoryview) -> None:
    num_taken = 0
    while num_taken < len(into):
        num_taken += _receive_some(connection, into[num_taken:])


def _receive_some(connection: socket.socket, into: memoryview) -> int:
    size = connection.recv_into(into)
    if not size:
        raise OSError("it hung up")
    return size
