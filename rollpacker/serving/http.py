"""A small HTTP/1.1 server in an event loop: h11 reads and writes the protocol, a handler answers.

One request of a connection after another; a handler whose client is gone is cancelled.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import h11

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
MAX_BODY_BYTES = 32 << 20
"""Of a request. More is refused."""
MAX_HEAD_BYTES = 64 << 10
_BACKLOG = 4096


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    """Without a query."""
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes

    @property
    def token(self) -> str:
        """Of `Authorization: Bearer TOKEN`; empty if there is none."""
        kind, _, token = self.headers.get("authorization", "").partition(" ")
        return token.strip() if kind.lower() == "bearer" else ""

    def has_token(self, token: str) -> bool:
        return hmac.compare_digest(self.token.encode(), token.encode())


@dataclass(frozen=True, slots=True)
class Answer:
    """With a body, or with one that comes in pieces."""

    status: int
    body: bytes = b""
    kind: str = "application/json"
    pieces: AsyncIterator[bytes] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


Handler = Callable[[Request], Awaitable[Answer]]
"""Raises nothing: what it raises all the same is a 500 and a line in the log."""


class Server:
    """Listens on one address."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()

    async def open(self, port: int = 0, host: str = LOOPBACK) -> int:
        """Listen; returns the port, which is a free one for 0. Raises `OSError`."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Connection(self._handler, self._connections), host, port, backlog=_BACKLOG
        )
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Let go of all connections; their handlers are cancelled. Idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        tasks = [task for one in [*self._connections] if (task := one.drop()) is not None]
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()


class _Connection(asyncio.Protocol):
    def __init__(self, handler: Handler, among: set[_Connection]) -> None:
        self._handler = handler
        self._among = among
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._transport: asyncio.Transport | None = None
        self._head: h11.Request | None = None
        self._body = bytearray()
        self._early = 0
        """Bytes of further requests that came before the answer to this one."""
        self._task: asyncio.Task[None] | None = None

    # -- the loop's --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._among.add(self)

    def connection_lost(self, _: Exception | None) -> None:
        self._transport = None
        self._among.discard(self)
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        if self._task is not None:
            self._early += len(data)
            if self._early > MAX_BODY_BYTES:
                self.drop()
                return
        self._http.receive_data(data)
        self._read()

    def eof_received(self) -> bool:
        return False  # the transport closes: nobody reads an answer any more

    def drop(self) -> asyncio.Task[None] | None:
        """Close it. Returns what is still to end."""
        task = self._task
        if task is not None:
            task.cancel()
        if self._transport is not None:
            self._transport.abort()
        return task

    # -- requests ----------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            while self._task is None and self._transport is not None:
                event = self._http.next_event()
                match event:
                    case h11.Request():
                        self._head, self._body = event, bytearray()
                        if self._http.they_are_waiting_for_100_continue:
                            self._send(h11.InformationalResponse(status_code=100, headers=[]))
                    case h11.Data():
                        self._body += event.data
                        if len(self._body) > MAX_BODY_BYTES:
                            raise h11.RemoteProtocolError("the request is too large", 413)
                    case h11.EndOfMessage():
                        self._task = asyncio.get_running_loop().create_task(self._answer())
                    case h11.ConnectionClosed():
                        self._transport.close()
                        return
                    case _:
                        return  # it needs more, or waits for our answer
        except h11.RemoteProtocolError as error:
            self._refuse(error.error_status_hint or 400)

    def _refuse(self, status: int) -> None:
        """What came is no request that could be answered."""
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            headers = [("connection", "close"), ("content-length", "0")]
            self._send(h11.Response(status_code=status, headers=headers))
            self._send(h11.EndOfMessage())
        if self._transport is not None:
            self._transport.close()

    async def _answer(self) -> None:
        assert self._head is not None
        path = self._head.target.decode("ascii", "replace").partition("?")[0]
        headers = {
            name.decode("ascii"): value.decode("latin-1") for name, value in self._head.headers
        }
        request = Request(self._head.method.decode("ascii"), path, headers, bytes(self._body))
        try:
            answer = await self._handler(request)
            await self._say(answer)
        except Exception:  # of the handler; the client is told, and others are served on
            logger.exception("a request to %s failed", path)
            if self._http.our_state is h11.SEND_RESPONSE:
                await self._say(Answer(500, b'{"error": {"message": "internal error"}}'))
        finally:
            self._task = None
        self._next()

    async def _say(self, answer: Answer) -> None:
        headers = [("content-type", answer.kind), *answer.headers.items()]
        if answer.pieces is None:
            headers.append(("content-length", str(len(answer.body))))
        self._send(h11.Response(status_code=answer.status, headers=headers))
        assert self._head is not None
        if self._head.method == b"HEAD":
            pass  # has an answer without a body
        elif answer.pieces is None:
            self._send(h11.Data(answer.body))
        else:
            async for piece in answer.pieces:
                self._send(h11.Data(piece))
        self._send(h11.EndOfMessage())

    def _send(self, event: Any) -> None:
        data = self._http.send(event)
        if data and self._transport is not None:
            self._transport.write(data)

    def _next(self) -> None:
        if self._transport is None:
            return
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
            self._early = 0
            self._read()
        else:
            self._transport.close()
