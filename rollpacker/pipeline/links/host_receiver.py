"""The receiving end of a host link (TCP between two pipeline stages): a port on each of the
receiver's addresses, a thread for each connection.

A complete message waits until all messages before it were delivered; once it is delivered too, it
is acknowledged. So no more messages wait here than the sender has connections.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollpacker.pipeline.links.device_copy import host_buffer, on_device
from rollpacker.pipeline.links.host_route import GREETING, MAX_CONNECTIONS, Patience, Route
from rollpacker.pipeline.links.link import (
    MAX_TIMES,
    ArrivalTimes,
    Border,
    Loss,
    OnArrival,
    OnLost,
    taken,
)
from rollpacker.pipeline.links.wire import (
    ALIVE,
    ANSWER,
    BYE,
    CLOSED,
    DELIVERED,
    HEADER,
    bytes_of,
    read_header,
)
from rollpacker.workers.line import Line
from rollpacker.workers.listener import Listener

LOOPBACK = "127.0.0.1"
MAX_BYTES = 16 << 30
"""Default for the most bytes of one message: a guard against nonsense, not a limit for work."""
ACCEPT_S = 0.2
"""Seconds after the closing of a link within which its receiver's ports are closed."""
_CPU = torch.device("cpu")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Connection:
    socket: socket.socket
    place: int
    """The sender's number of this connection, from 0. A connection made anew keeps its number."""
    greeting: int
    """Number of the sender's earlier connections: of two with one `place`, the later is valid."""

    def interrupt(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def say(self, kind: int, number: int = 0) -> None:
        self.socket.sendall(ANSWER.pack(kind, number))


class HostReceiver:
    """Receives tensors from a stage over TCP. Per connection, one at most waits for delivery."""

    def __init__(
        self,
        border: Border,
        *,
        on_arrival: OnArrival,
        on_lost: OnLost,
        hosts: Sequence[str] = (LOOPBACK,),
        device: torch.device = _CPU,
        max_bytes: int = MAX_BYTES,
        patience: Patience | None = None,
    ) -> None:
        """Listen on these addresses (`hosts`) of this machine; the sender may use any. Tensors are
        put on `device` and given to `on_arrival`. Raises `OSError` for an address that is not this
        machine's, and `ValueError` for one such as 0.0.0.0 that stands for all of its addresses."""
        self._border = border
        self._on_arrival = on_arrival
        self._device = device
        self._max_bytes = max_bytes
        self._patience = patience or Patience()
        self._loss = Loss(on_lost)
        self._turn = threading.Condition()
        self._next = 0
        """The number of the next message to deliver."""
        self._connections: dict[int, _Connection] = {}
        self._alone_since = time.monotonic()
        """The `time.monotonic` since when the sender is not connected; meaningless while it is."""
        self._times: deque[ArrivalTimes] = deque(maxlen=MAX_TIMES)
        self._listeners: list[Listener] = []
        try:
            self._listeners += (_listener(host) for host in hosts)
        except BaseException:
            self._close_listeners()
            raise
        self._threads = [
            threading.Thread(
                target=self._accept, args=(one,), name=f"hears {border.peer}", daemon=True
            )
            for one in self._listeners
        ]
        for thread in tuple(self._threads):
            thread.start()

    @property
    def routes(self) -> tuple[Route, ...]:
        """The addresses, ports and tokens by which the sender can reach this receiver."""
        return tuple(
            Route(host=one.host, port=one.port, token=one.token) for one in self._listeners
        )

    def times(self) -> list[ArrivalTimes]:
        return taken(self._times)

    def close(self) -> None:
        self._loss.close()
        with self._turn:
            self._turn.notify_all()
            for connection in self._connections.values():
                with contextlib.suppress(OSError):
                    connection.say(CLOSED)
                connection.interrupt()
        while self._threads:  # one that accepts may start another before it ends
            self._threads.pop(0).join()
        self._close_listeners()

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()

    # -- in the threads -------------------------------------------------------------------

    def _accept(self, listener: Listener) -> None:
        while not self._loss.over.is_set():
            for line, greeting in listener.accept(ACCEPT_S):
                self._admit(line, greeting)
            with self._turn:
                alone_s = 0.0 if self._connections else time.monotonic() - self._alone_since
            if alone_s > self._patience.give_up_s:
                self._lose(f"it did not come within {alone_s:.0f} s", listener)

    def _admit(self, line: Line, said: bytes) -> None:
        try:
            place, greeting = GREETING.unpack(said)
        except struct.error:
            place, greeting = MAX_CONNECTIONS, 0
        with self._turn:
            before = self._connections.get(place)
            is_late = before is not None and before.greeting > greeting
            if self._loss.over.is_set() or place >= MAX_CONNECTIONS or is_late:
                line.close()
                return
            if before is not None:
                before.interrupt()
            connection = _Connection(line.released(), place, greeting)
            self._connections[place] = connection
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            thread.name = f"receives from {self._border.peer}"
            self._threads = [*(one for one in self._threads if one.is_alive()), thread]
            thread.start()

    def _serve(self, connection: _Connection) -> None:
        try:
            connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._turn:
                next_number = self._next
            connection.say(DELIVERED, next_number)
            while not self._loss.over.is_set():
                self._receive(connection)
        except (OSError, ValueError) as error:  # the sender makes another
            logger.info("%s: a connection ended: %s", self._border, error)
        except Exception as error:  # nobody else would hear of it, and the sender would go on
            self._lose(f"receiving failed here: {error!r}", self._listeners[0])
            raise
        finally:
            with self._turn:
                if self._connections.get(connection.place) is connection:
                    del self._connections[connection.place]
                    self._alone_since = time.monotonic()
                connection.socket.close()

    def _receive(self, connection: _Connection) -> None:
        """Receive a message, call `on_arrival` with it, and acknowledge it. Raises `OSError` if the
        connection breaks, and `ValueError` for a damaged message."""
        connection.socket.settimeout(None)
        head = bytearray(HEADER.size)
        self._fill(connection, memoryview(head))
        header = read_header(head, self._max_bytes)
        if header.kind == BYE:
            self._lose("it was closed there", self._listeners[0])
            return
        connection.socket.settimeout(self._patience.alive_s)
        tensor = host_buffer(header.shape, header.dtype, self._device)
        data = bytes_of(tensor)
        self._fill(connection, data)
        if zlib.crc32(data) != header.checksum:
            raise ValueError(f"message {header.number} came damaged")
        times = ArrivalTimes(
            number=header.number,
            num_bytes=header.num_bytes,
            posted_s=header.posted_s,
            arrived_s=time.monotonic(),
        )
        self._deliver(connection, on_device(tensor, self._device), times)

    def _fill(self, connection: _Connection, data: memoryview) -> None:
        """Fill `data` with bytes from the connection, and tell the sender now and then that this
        receiver is alive. Raises `OSError` if the connection breaks."""
        said_at = time.monotonic()
        while len(data):
            with contextlib.suppress(TimeoutError):
                num_bytes = connection.socket.recv_into(data)
                if num_bytes == 0:
                    raise ConnectionError("it hung up")
                data = data[num_bytes:]
            if time.monotonic() - said_at > self._patience.alive_s:
                connection.say(ALIVE)
                said_at = time.monotonic()

    def _deliver(self, connection: _Connection, tensor: Tensor, times: ArrivalTimes) -> None:
        with self._turn:
            while times.number > self._next and not self._loss.over.is_set():
                if not self._turn.wait(self._patience.alive_s):
                    connection.say(ALIVE)
            if self._loss.over.is_set():
                return
            if times.number == self._next:
                self._times.append(times)
                self._on_arrival(times.number, tensor)
                self._next += 1
                self._turn.notify_all()
            next_number = self._next
        connection.say(DELIVERED, next_number)

    def _lose(self, why: str, listener: Listener) -> None:
        self._loss.lose(self._border.lost(why, f"{listener.host}:{listener.port}"))
        with self._turn:
            self._turn.notify_all()


def _listener(host: str) -> Listener:
    if host in ("", "0.0.0.0", "::"):
        raise ValueError(
            f"a link listens at one address of this machine, and {host!r} stands for all of them"
        )
    return Listener(host)
