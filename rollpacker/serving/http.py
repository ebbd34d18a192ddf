"""A small HTTP/1.1 server in an event loop: h11 reads and writes the protocol, a handler answers.

One request of a connection after another; a handler whose client is gone is cancelled. Who may ask
is decided by a request's head, before its body is kept; who does not get further than that in time
is let go of, and goes first where there are too many.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import resource
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
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


Admit = Callable[[Request], Answer | None]
"""Of a request's head, with an empty body: what is answered instead, if it is not to be handled.
What comes of its body is thrown away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What clients may hold. None: as much as they like."""

    connections: int | None = None
    """At once. One more takes the place of the one that has been without an admitted request for
    the longest, and is answered 503 if there is none."""
    head_s: float | None = None
    """Within which the head of a request is there, from the connection's beginning or the answer
    before."""
    body_s: float | None = None
    """... and, from then on, its body."""


def most_connections(wanted: int) -> int:
    """As many as are wanted, or as the process may have files, less some for other things."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if files == resource.RLIM_INFINITY else max(min(wanted, files - 128), 16)


class Server:
    """Listens on one address."""

    def __init__(
        self,
        handler: Handler,
        *,
        admit: Admit = lambda head: None,
        limits: Limits = Limits(),
    ) -> None:
        self._shared = _Shared(handler, admit, limits)
        self._server: asyncio.Server | None = None

    async def open(self, port: int = 0, host: str = LOOPBACK) -> int:
        """Listen; returns the port, which is a free one for 0. Raises `OSError`."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Connection(self._shared), host, port, backlog=_BACKLOG
        )
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Let go of all connections; their handlers are cancelled. Idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        tasks = [task for one in [*self._shared.open] if (task := one.drop()) is not None]
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()


@dataclass(frozen=True, slots=True)
class _Shared:
    """Of all connections."""

    handler: Handler
    admit: Admit
    limits: Limits
    open: set[_Connection] = field(default_factory=set)
    waiting: dict[_Connection, None] = field(default_factory=dict)
    """Those without an admitted request, who waits for the longest first."""

    def is_full(self) -> bool:
        """One more is there than may be. Lets go of another one, if that helps."""
        most = self.limits.connections
        if most is None or len(self.open) <= most:
            return False
        if not self.waiting:
            return True
        next(iter(self.waiting)).drop()
        return False


class _Connection(asyncio.Protocol):
    def __init__(self, shared: _Shared) -> None:
        self._shared = shared
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._transport: asyncio.Transport | None = None
        self._head: Request | None = None
        """Of the request at hand, without its body."""
        self._body = bytearray()
        self._num_read = 0
        """Bytes of the body, kept or not."""
        self._is_refused = False
        self._timer: asyncio.TimerHandle | None = None
        self._early = 0
        """Bytes of further requests that came before the answer to this one."""
        self._task: asyncio.Task[None] | None = None

    # -- the loop's --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._shared.open.add(self)
        if self._shared.is_full():
            self._refuse(503)
        else:
            self._wait()

    def connection_lost(self, _: Exception | None) -> None:
        self._forget()
        if self._task is not None:
            self._task.cancel()

    def _forget(self) -> None:
        self._transport = None
        self._shared.open.discard(self)
        self._shared.waiting.pop(self, None)
        self._within(None)

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
        self._forget()
        return task

    # -- requests ----------------------------------------------------------------------------------

    def _wait(self) -> None:
        """For the next request."""
        self._shared.waiting[self] = None
        self._within(self._shared.limits.head_s)

    def _within(self, seconds: float | None) -> None:
        """What is awaited comes within so many seconds, or the connection goes."""
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = None if seconds is None else loop.call_later(seconds, self.drop)

    def _read(self) -> None:
        try:
            while self._task is None and self._transport is not None:
                event = self._http.next_event()
                match event:
                    case h11.Request():
                        self._begin(event)
                    case h11.Data():
                        self._num_read += len(event.data)
                        if self._num_read > MAX_BODY_BYTES:
                            raise h11.RemoteProtocolError("the request is too large", 413)
                        if not self._is_refused:
                            self._body += event.data
                    case h11.EndOfMessage() if self._is_refused:
                        self._transport.close()
                        return
                    case h11.EndOfMessage():
                        self._within(None)
                        self._task = asyncio.get_running_loop().create_task(self._answer())
                    case h11.ConnectionClosed():
                        self._transport.close()
                        return
                    case _:
                        return  # it needs more, or waits for our answer
        except h11.RemoteProtocolError as error:
            self._refuse(error.error_status_hint or 400)

    def _begin(self, head: h11.Request) -> None:
        """A request, whose body is to come."""
        self._head, self._body, self._num_read = _read_head(head), bytearray(), 0
        expects_word = self._http.they_are_waiting_for_100_continue
        refusal = self._shared.admit(self._head)
        if refusal is not None:
            self._is_refused = True
            self._say_whole(refusal, {"connection": "close"})
            if expects_word and self._transport is not None:
                self._transport.close()
            return
        self._shared.waiting.pop(self, None)
        self._within(self._shared.limits.body_s)
        if expects_word:
            self._send(h11.InformationalResponse(status_code=100, headers=[]))

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
        request = replace(self._head, body=bytes(self._body))
        try:
            answer = await self._shared.handler(request)
            if answer.pieces is None:
                self._say_whole(answer, {})
            else:
                await self._say_pieces(answer, answer.pieces)
        except Exception:  # of the handler; the client is told, and others are served on
            logger.exception("a request to %s failed", request.path)
            if self._http.our_state is h11.SEND_RESPONSE:
                self._say_whole(Answer(500, b'{"error": {"message": "internal error"}}'), {})
        finally:
            self._task = None
        self._next()

    def _say_whole(self, answer: Answer, more: Mapping[str, str]) -> None:
        self._say_head(answer, {"content-length": str(len(answer.body)), **more})
        if self._has_body:
            self._send(h11.Data(answer.body))
        self._send(h11.EndOfMessage())

    async def _say_pieces(self, answer: Answer, pieces: AsyncIterator[bytes]) -> None:
        self._say_head(answer, {})
        if self._has_body:
            async for piece in pieces:
                self._send(h11.Data(piece))
        self._send(h11.EndOfMessage())

    def _say_head(self, answer: Answer, more: Mapping[str, str]) -> None:
        headers = [("content-type", answer.kind), *answer.headers.items(), *more.items()]
        self._send(h11.Response(status_code=answer.status, headers=headers))

    @property
    def _has_body(self) -> bool:
        """An answer to HEAD has none."""
        assert self._head is not None
        return self._head.method != "HEAD"

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
            self._wait()
            self._read()
        else:
            self._transport.close()


def _read_head(head: h11.Request) -> Request:
    path = head.target.decode("ascii", "replace").partition("?")[0]
    headers = {name.decode("ascii"): value.decode("latin-1") for name, value in head.headers}
    return Request(head.method.decode("ascii"), path, headers, b"")
