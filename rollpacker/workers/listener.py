"""Accepts connections of processes that were not started by this one, if they show a token.

A connection is closed unless it shows the token within `KNOCK_S`, in a message of at most
`MAX_HELLO_BYTES`. Until then its bytes are only compared with the token; no other waits for it.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import time
from dataclasses import dataclass

from rollpacker.workers.frames import MAX_BYTES
from rollpacker.workers.kinds import HELLO
from rollpacker.workers.line import HasFileno, Line, LineEnded, ready

KNOCK_S = 10.0
"""Seconds within which a new connection to the port must show the token."""
MAX_HELLO_BYTES = 4096
MAX_KNOCKING = 64
"""The most connections that have not shown the token yet. One more closes the oldest."""
_TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True)
class _Knock:
    line: Line
    until: float
    """The `time.monotonic` at which the connection is closed if it has not shown the token."""


class Listener:
    """An open port. One thread at a time uses it; an event loop does so by `asyncio.to_thread`."""

    def __init__(self, host: str) -> None:
        """Listen on any free port of the address `host`. Raises `OSError`."""
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        self._socket = socket.socket(family, kind, protocol)
        self._socket.bind(address)
        self._socket.listen(128)
        self._socket.setblocking(False)
        self.host: str = self._socket.getsockname()[0]
        self.port: int = self._socket.getsockname()[1]
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        """The secret that a process must give to `connect` to be accepted."""
        self._knocks: list[_Knock] = []

    def accept(self, within_s: float) -> list[tuple[Line, bytes]]:
        """Wait until a connection shows the token. Returns, for each that has, its line and the
        bytes that it sent after the token; an empty list if none has after `within_s` seconds."""
        until = time.monotonic() + within_s
        found: list[tuple[Line, bytes]] = []
        while not found:
            now = time.monotonic()
            for late in [knock for knock in self._knocks if knock.until < now]:
                self._forget(late)
            if now > until:
                break
            waiting: list[HasFileno] = [self._socket, *(knock.line for knock in self._knocks)]
            next_s = min([until, *(knock.until for knock in self._knocks)]) - now
            readable = ready(waiting, next_s)
            for knock in [knock for knock in self._knocks if knock.line in readable]:
                hello = self._hello(knock)
                if hello is not None:
                    found.append((knock.line, hello))
            if self._socket in readable:
                self._open()
        return found

    def _open(self) -> None:
        with contextlib.suppress(OSError):  # whoever knocked may be gone already
            connection, _ = self._socket.accept()
            connection.setblocking(True)
            line = Line(_watched(connection), max_bytes=MAX_HELLO_BYTES)
            self._knocks.append(_Knock(line, time.monotonic() + KNOCK_S))
        if len(self._knocks) > MAX_KNOCKING:
            self._forget(self._knocks[0])

    def _hello(self, knock: _Knock) -> bytes | None:
        """Return the bytes after the token; None if the message is incomplete or wrong."""
        try:
            messages = knock.line.read()
        except LineEnded:
            self._forget(knock)
            return None
        if not messages:
            return None
        said = messages[0]
        knows = hmac.compare_digest(said.payload[:_TOKEN_BYTES], self.token)
        if len(messages) > 1 or said.kind != HELLO or not knows:
            self._forget(knock)
            return None
        self._knocks.remove(knock)
        knock.line.frames.max_bytes = MAX_BYTES
        return said.payload[_TOKEN_BYTES:]

    def _forget(self, knock: _Knock) -> None:
        self._knocks.remove(knock)
        knock.line.close()

    def close(self) -> None:
        """Close the port, and the connections that have not shown the token."""
        self._socket.close()
        while self._knocks:
            self._forget(self._knocks[0])


def connect(
    host: str,
    port: int,
    token: bytes,
    hello: bytes,
    *,
    source: str | None = None,
    within_s: float | None = None,
) -> Line:
    """Connect to a `Listener` by its `token`, say `hello`, and return the line. `source`: address
    to connect from; None: any. Raises `OSError`, also after `within_s` seconds, and `LineEnded`."""
    own = None if source is None else (source, 0)
    line = Line(_watched(socket.create_connection((host, port), within_s, own)))
    try:
        line.send(HELLO, payload=token + hello)
    except LineEnded:
        line.close()
        raise
    return line


def _watched(connection: socket.socket) -> socket.socket:
    """Return the connection, with TCP keep-alive: a silent end of the other side is noticed."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return connection
