"""The sending end of a host link (TCP between two pipeline stages): some connections, a thread for
each, and the messages that the receiver has not acknowledged.

Each connection carries one message at a time, the waiting one with the lowest number, and takes the
next when the receiver has acknowledged this one. A connection that breaks or falls silent is made
anew, and its message waits again: the receiver drops a message that it has already.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import select
import socket
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from rollpacker.pipeline.links.device_copy import HostCopies, HostCopy
from rollpacker.pipeline.links.host_route import GREETING, MAX_CONNECTIONS, Patience, Route
from rollpacker.pipeline.links.link import (
    MAX_TIMES,
    Border,
    Loss,
    OnLost,
    SendTimes,
    taken,
)
from rollpacker.pipeline.links.wire import (
    ANSWER,
    CLOSED,
    DELIVERED,
    bytes_of,
    fits,
    packed_bye,
    packed_header,
)
from rollpacker.workers.line import LineEnded
from rollpacker.workers.listener import connect

PAUSE_S = 0.05
"""Seconds between the first two attempts to connect; the pause then grows up to `MAX_PAUSE_S`."""
MAX_PAUSE_S = 0.5

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Message:
    number: int
    copy: HostCopy
    posted_s: float
    started_s: float = 0.0


class _PeerClosed(Exception):
    """Raised inside the sender once the receiver has said that it has closed the link."""


class HostSender:
    """Sends tensors to a neighbouring stage over TCP. It keeps them until acknowledged."""

    def __init__(
        self,
        border: Border,
        routes: Sequence[Route],
        *,
        on_lost: OnLost,
        max_connections: int = 16,
        patience: Patience | None = None,
    ) -> None:
        """Begin to connect in the background, to the first route (address of the receiver) that
        answers. A connection is added when there are more messages than connections: a message
        takes one for `t` seconds until it is acknowledged, so a stage that sends a message every
        `f` seconds gets ceil(t / f) connections, at most `max_connections`."""
        assert 0 < max_connections <= MAX_CONNECTIONS and routes
        self._border = border
        self._routes = routes
        self._patience = patience or Patience()
        self._loss = Loss(on_lost)
        self._changed = threading.Condition()
        self._messages: dict[int, _Message] = {}
        """Messages that the receiver has not acknowledged yet, by number, in order."""
        self._waiting: list[int] = []
        """Numbers of the messages that wait for a connection, as a heap."""
        self._num_posted = 0
        self._connections: set[_Connection] = set()
        self._greetings = itertools.count()
        self._copies = HostCopies()
        self._times: deque[SendTimes] = deque(maxlen=MAX_TIMES)
        self._max_connections = max_connections
        self._threads: list[threading.Thread] = []
        """The threads that send, one for each connection."""
        with self._changed:
            self._add_connection()

    def _add_connection(self) -> None:
        place = len(self._threads)
        thread = threading.Thread(target=self._run, args=(place,), daemon=True)
        thread.name = f"sends to {self._border.peer}"
        self._threads.append(thread)
        thread.start()

    def send(self, number: int, tensor: Tensor, *, posted_s: float | None = None) -> None:
        """Begin to send message `number`, counted from 0, and return at once. `posted_s`: the time
        to record for the call; None: now. Raises `LinkLost` on a lost link."""
        assert number == self._num_posted, f"message {number} after {self._num_posted - 1}"
        assert fits(tensor), f"no message holds {tensor.ndim} dimensions of {tensor.dtype}"
        self._loss.check()
        self._num_posted += 1
        posted_s = time.monotonic() if posted_s is None else posted_s
        message = _Message(number, self._copies.begin(tensor), posted_s)
        with self._changed:
            self._messages[number] = message
            heapq.heappush(self._waiting, number)
            self._changed.notify()
            if len(self._messages) > len(self._threads) < self._max_connections:
                self._add_connection()

    def times(self) -> list[SendTimes]:
        """Return the times of messages that were acknowledged since the last call."""
        return taken(self._times)

    def close(self) -> None:
        """End the sender's threads and connections; at most as long as making a connection takes.
        Messages that have not arrived are dropped. Idempotent."""
        self._loss.close()
        self._wake()
        for thread in self._threads:
            thread.join()
        with self._changed:
            self._messages.clear()

    def _wake(self) -> None:
        """Wake all threads once the link is closed or lost. Connections that send are cut off."""
        with self._changed:
            self._changed.notify_all()
            for connection in self._connections:
                if connection.carries in self._messages:
                    connection.interrupt()

    # -- in the threads -------------------------------------------------------------------

    def _run(self, place: int) -> None:
        first_route = 0
        while (connection := self._connected(place, first_route)) is not None:
            first_route = 0
            try:
                self._serve(connection)
            except _PeerClosed:
                self._lose("it was closed there", connection.route)
            except OSError as error:
                if not self._loss.over.is_set():
                    logger.warning("%s: a connection broke: %s", self._border, error)
                if isinstance(error, TimeoutError):  # its route is tried last
                    first_route = 1 + connection.place_of_route
            except Exception as error:  # nobody else would hear of it
                self._lose(f"sending failed here: {error!r}", connection.route)
                raise
            finally:
                with self._changed:
                    self._connections.discard(connection)
                    connection.close()

    def _connected(self, place: int, first_route: int) -> _Connection | None:
        """Connect, first over this route, until the receiver accepts. None: link closed or lost."""
        since = time.monotonic()
        for attempt in itertools.count():
            if self._loss.over.is_set():
                return None
            place_of_route = (first_route + attempt) % len(self._routes)
            route = self._routes[place_of_route]
            try:
                return self._welcomed(place, place_of_route)
            except _PeerClosed:
                why = "it was closed there"
            except (OSError, LineEnded, ValueError) as error:
                why = str(error)
            waited_s = time.monotonic() - since
            if waited_s > self._patience.give_up_s:
                self._lose(f"not reached for {waited_s:.0f} s ({why})", route)
            round_ = (attempt + 1) // len(self._routes)
            if (attempt + 1) % len(self._routes) == 0:
                self._loss.over.wait(min(PAUSE_S * round_, MAX_PAUSE_S))
        raise AssertionError("unreachable")

    def _welcomed(self, place: int, place_of_route: int) -> _Connection:
        """Return a new connection, number `place`, that the receiver has accepted over this route.
        Raises `OSError`, `LineEnded` or `_PeerClosed`, and `ValueError` for a wrong answer."""
        route, patience = self._routes[place_of_route], self._patience
        with self._changed:
            greeting = GREETING.pack(place, next(self._greetings))
        line = connect(
            route.host,
            route.port,
            route.token,
            greeting,
            source=route.source,
            within_s=patience.connect_s,
        )
        connection = _Connection(line.released(), route, place_of_route)
        try:
            self._acknowledge(connection.wait_for_welcome(patience.connect_s))
        except BaseException:
            connection.close()
            raise
        with self._changed:
            self._connections.add(connection)
        return connection

    def _serve(self, connection: _Connection) -> None:
        """Send messages over this connection until the link is closed or lost. Raises `OSError` if
        the connection breaks, `_PeerClosed` if the receiver is closed."""
        while (message := self._take(connection)) is not None:
            try:
                tensor = message.copy.wait()
                data = bytes_of(tensor)
                checksum = zlib.crc32(data)
                header = packed_header(message.number, tensor, message.posted_s, checksum)
                message.started_s = time.monotonic()
                connection.carry(
                    message.number,
                    header,
                    data,
                    delivered=self._acknowledge,
                    silence_s=self._patience.silence_s,
                )
            except BaseException:
                with self._changed:
                    heapq.heappush(self._waiting, message.number)
                    self._changed.notify()
                raise
        connection.say_goodbye()

    def _take(self, connection: _Connection) -> _Message | None:
        """Wait for a message that no connection carries. None: the link is closed or lost."""
        with self._changed:
            connection.carries = None
            while not self._loss.over.is_set():
                while self._waiting:
                    message = self._messages.get(heapq.heappop(self._waiting))
                    if message is not None:
                        connection.carries = message.number
                        return message
                self._changed.wait()
        return None

    def _acknowledge(self, next_number: int) -> None:
        """Drop the messages below `next_number`, which are delivered, and record their times."""
        now = time.monotonic()
        with self._changed:
            for number in [one for one in self._messages if one < next_number]:
                message = self._messages.pop(number)
                self._times.append(
                    SendTimes(
                        number=number,
                        num_bytes=message.copy.num_bytes,
                        posted_s=message.posted_s,
                        started_s=message.started_s,
                        acknowledged_s=now,
                    )
                )

    def _lose(self, why: str, route: Route) -> None:
        self._loss.lose(self._border.lost(why, str(route)))
        self._wake()


class _Connection:
    """One connection to a receiver. Its own thread alone calls its methods, except `interrupt`."""

    def __init__(self, connection: socket.socket, route: Route, place_of_route: int) -> None:
        self.route = route
        self.place_of_route = place_of_route
        self.carries: int | None = None
        """The number of the message that the connection carries. If None, or if that message is
        acknowledged, the connection is idle, even if its thread has not noticed."""
        self._socket = connection
        self._answers = bytearray()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def wait_for_welcome(self, within_s: float) -> int:
        """Wait up to `within_s` for the receiver. Returns the next message number it wants."""
        self._socket.setblocking(False)
        until = time.monotonic() + within_s
        while time.monotonic() < until:
            if self._poll.poll(max(until - time.monotonic(), 0) * 1000):
                for next_number in self._delivered("it was turned away: is the token right?"):
                    return next_number
        raise TimeoutError(f"no answer within {within_s} s")

    def carry(
        self,
        number: int,
        header: bytes,
        data: memoryview,
        *,
        delivered: Callable[[int], None],
        silence_s: float,
    ) -> None:
        """Send a message, and return once the receiver has delivered it. `delivered` is called with
        the lowest number of a message not delivered yet. Raises `OSError` if the connection breaks
        or the receiver is silent for `silence_s` seconds."""
        unsent = [memoryview(header), data]
        self._poll.modify(self._socket, select.POLLIN | select.POLLOUT)
        while True:
            events = self._poll.poll(silence_s * 1000)
            if not events:
                raise TimeoutError(f"{self.route} was silent for {silence_s} s")
            if events[0][1] & ~select.POLLOUT:
                for next_number in self._delivered("it hung up"):
                    delivered(next_number)
                    if next_number > number:
                        assert not unsent, "acknowledged before it was sent"
                        return
            elif unsent:
                with contextlib.suppress(BlockingIOError):
                    _drop(unsent, self._socket.sendmsg(unsent))
                if not unsent:
                    self._poll.modify(self._socket, select.POLLIN)

    def _delivered(self, if_ended: str) -> list[int]:
        """Read the receiver's answers. Returns the lowest number not delivered yet for each
        acknowledgement; others only show that it lives. Raises `ConnectionError(if_ended)`."""
        with contextlib.suppress(BlockingIOError):
            said = self._socket.recv(4096)
            if not said:
                raise ConnectionError(if_ended)
            self._answers += said
        found = []
        while len(self._answers) >= ANSWER.size:
            kind, next_number = ANSWER.unpack_from(self._answers)
            del self._answers[: ANSWER.size]
            if kind == CLOSED:
                raise _PeerClosed
            if kind == DELIVERED:
                found.append(next_number)
        return found

    def say_goodbye(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.send(packed_bye())

    def interrupt(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def _drop(views: list[memoryview], num_bytes: int) -> None:
    """Drop this many bytes, which have been sent, from the front of the list, in place."""
    while views and num_bytes >= len(views[0]):
        num_bytes -= len(views.pop(0))
    if num_bytes:
        views[0] = views[0][num_bytes:]
