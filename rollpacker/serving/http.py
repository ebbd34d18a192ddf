"""An HTTP server in an event loop: uvicorn speaks the protocol, a Starlette application answers.

This module adds how strangers and slow clients are treated. Who may ask is decided by the head of a
request, before its body is read. A client that does not send its request in time is disconnected;
if there are too many connections, one without a request goes first. A handler whose client has gone
is cancelled."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollpacker.imports import require
from rollpacker.serving.chat import ApiError

try:
    import h11
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.gzip import GZipMiddleware
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route
    from uvicorn.protocols.http.h11_impl import H11Protocol
    from uvicorn.server import ServerState
except ModuleNotFoundError:
    require("starlette", extra="serve", what="serving over HTTP")
    require("uvicorn", extra="serve", what="serving over HTTP")
    raise

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = [
    "GZipMiddleware",
    "Middleware",
    "Request",
    "Response",
    "Route",
    "Starlette",
    "StreamingResponse",
]
"""Names of Starlette with which applications are made. They are imported from here, so that a
missing package gives the same one-sentence error everywhere."""

LOOPBACK = "127.0.0.1"
MAX_BODY_BYTES = 32 << 20
"""Maximum number of bytes of a request's body. A larger body is refused with status 413."""
MAX_HEAD_BYTES = 64 << 10
_BACKLOG = 4096
_ADMITTED = "admitted"
"""Key, in a request's `state`, of its connection's method `_Connection.admitted`."""
_FOREVER_S = 1 << 30
"""Seconds of uvicorn's own limit on idle connections: so many that it never applies, since the
timers of `_Connection` take its place."""

Admit = Callable[[Request], Response | None]
"""Type of a function that looks at the head of a request (the body must not be read). It returns
None if the request may be handled, or else the response that refuses the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on the connections and requests of a server's clients. None: no limit."""

    connections: int | None = None
    """Maximum number of connections at once. For one more, the connection that has been without an
    admitted request for the longest is ended; if all have one, the new one gets status 503."""
    head_s: float | None = None
    """Seconds for the whole head of a request, from the connection's start or last response."""
    body_s: float | None = None
    """Seconds within which the whole body of a request must come, from the end of its head."""


def most_connections(wanted: int) -> int:
    """Returns the wanted number of connections, or a smaller one if the process may not open so
    many files. A part of the files is left for other uses."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if files == resource.RLIM_INFINITY else max(min(wanted, files - 128), 16)


def has_token(request: Request, token: str) -> bool:
    """Whether the request has this token, compared in a time that tells nothing about the token."""
    return hmac.compare_digest(token_of(request).encode(), token.encode())


def token_of(request: Request) -> str:
    """The token in the request's header `Authorization: Bearer TOKEN`. Empty if there is none."""
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""


class Server:
    """HTTP server of an ASGI application on one address. `admit` may refuse a request."""

    def __init__(
        self, app: ASGIApp, *, admit: Admit = lambda request: None, limits: Limits = Limits()
    ) -> None:
        self._limits = limits
        self._config = uvicorn.Config(
            _Guarded(app, admit),
            lifespan="off",
            ws="none",
            log_config=None,
            log_level=logging.ERROR,  # a client that sends nonsense is no news
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=_FOREVER_S,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        )
        self._state = ServerState()
        self._server: asyncio.Server | None = None

    async def open(self, port: int = 0, host: str = LOOPBACK) -> int:
        """Listen at `host`, and return the port, which is a free one if `port` is 0. Raises
        `OSError`, and `OverflowError` if `port` is no number of a port."""
        idle: dict[_Connection, None] = {}
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _Connection(self._config, self._state, self._limits, idle),
            host,
            port,
            backlog=_BACKLOG,
        )
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """End all connections and cancel their handlers. Calling it again does nothing."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        for connection in [*self._state.connections]:
            connection.transport.abort()
        await asyncio.sleep(0)  # uvicorn learns that they have ended, and logs no broken responses
        tasks = [*self._state.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()


def in_json(value: Any, status: int = 200, *, headers: Mapping[str, str] | None = None) -> Response:
    """Returns a JSON response in ASCII. Starlette's own cannot send every text, such as half a
    surrogate pair in a file's name or in what a client sent."""
    return Response(json.dumps(value), status, headers, media_type="application/json")


def api(routes: Sequence[Route], *, error_headers: Mapping[str, str] | None = None) -> Starlette:
    """Returns a Starlette application with these routes. Its error responses have the form of
    OpenAI's API, and also the headers `error_headers` (None: no others)."""

    async def refuse(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):  # there is no such path, or it has no such method
            error = ApiError(f"there is no {request.method} {request.url.path} here", status=404)
        assert isinstance(error, ApiError)
        return in_json(error.body, error.status, headers=error_headers)

    return Starlette(routes=routes, exception_handlers={ApiError: refuse, HTTPException: refuse})


class _Guarded:
    """Wraps an application: lets an `Admit` function refuse requests by their heads, refuses bodies
    that are too large, and cancels a request's handler if its client has gone."""

    def __init__(self, app: ASGIApp, admit: Admit) -> None:
        self._app = app
        self._admit = admit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._admit(Request(scope))
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        scope["state"][_ADMITTED]()
        try:
            body = await _read(Request(scope, receive))
        except HTTPException as error:
            await Response(error.detail, error.status_code)(scope, receive, send)
            return
        if body is not None:
            await self._answer(body, scope, receive, send)

    async def _answer(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application with the whole body, and cancel it if its client has gone."""
        gone = asyncio.ensure_future(receive())
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replayed() -> Message:
            return messages.pop() if messages else await asyncio.shield(gone)

        # With this version Starlette leaves it to the server to notice that a client has gone.
        scope["asgi"] = {**scope["asgi"], "spec_version": "2.4"}
        answer = asyncio.ensure_future(self._app(scope, replayed, send))
        try:
            await asyncio.wait({gone, answer}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                answer.cancel()
            await answer
        except asyncio.CancelledError:
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)
        finally:
            gone.cancel()


async def _read(request: Request) -> bytes | None:
    """Returns a request's body, or None if the client has gone meanwhile. Raises `HTTPException`
    (status 413) for too large a body."""
    body, is_whole = bytearray(), False
    declared = int(request.headers.get("content-length", 0))
    while max(declared, len(body)) <= MAX_BODY_BYTES:
        if is_whole:
            return bytes(body)
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        is_whole = not message.get("more_body")
    raise HTTPException(413, "the request is too large")


class _Connection(H11Protocol):
    """Connection of one client. It is ended if the client sends too slowly or too much, or if there
    are more connections than `Limits.connections`."""

    def __init__(
        self,
        config: uvicorn.Config,
        state: ServerState,
        limits: Limits,
        idle: dict[_Connection, None],
    ) -> None:
        """`idle`: the server's connections without an admitted request, in order of waiting, the
        longest first. All connections of a server share this mapping."""
        super().__init__(config, state, {_ADMITTED: self.admitted})
        self._limits = limits
        self._idle = idle
        self._num_bytes = 0
        """Number of bytes that the client has sent since the last response."""
        self._awaited: str | None = None
        """Part of a request that the client has to send next: "head" or "body"; None: no part."""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        most = self._limits.connections
        if most is not None and len(self.connections) > most:
            if not self._idle:
                refusal = b"connection: close\r\ncontent-length: 0\r\n\r\n"
                transport.write(b"HTTP/1.1 503 Service Unavailable\r\n" + refusal)
                transport.close()
                return
            next(iter(self._idle)).end()
        self._look()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._forget()

    def data_received(self, data: bytes) -> None:
        self._num_bytes += len(data)
        if self._num_bytes > MAX_BODY_BYTES + MAX_HEAD_BYTES:
            self.end()
            return
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        self._num_bytes = 0
        super().on_response_complete()
        self._look()

    def admitted(self) -> None:
        """Note that the connection's request was admitted and is being handled."""
        self._idle.pop(self, None)

    def end(self) -> None:
        """End the connection at once, even if a response was not sent whole."""
        self.transport.abort()
        self._forget()

    def _forget(self) -> None:
        self._awaited = None
        self._idle.pop(self, None)
        self.connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        """Note which part of a request the client has to send next. If that has changed, start the
        timer that ends the connection when the part is late."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            self._idle.setdefault(self)
        turns = {h11.IDLE: "head", h11.SEND_BODY: "body"}
        awaited = turns.get(self.conn.their_state)
        if awaited == self._awaited:
            return
        self._awaited = awaited
        if self._timer is not None:
            self._timer.cancel()
        seconds = {"head": self._limits.head_s, "body": self._limits.body_s}.get(awaited or "")
        self._timer = None if seconds is None else self.loop.call_later(seconds, self.end)
