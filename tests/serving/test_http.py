"""The server under clients that say anything at all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from rollpacker.serving import http
from rollpacker.serving.http import Answer, Request, Server


async def echo(request: Request) -> Answer:
    if request.path == "/fails":
        raise RuntimeError("a secret")
    return Answer(200, request.method.encode() + b" " + request.body, "text/plain")


def talk(handler: Callable[[Request], Awaitable[Answer]], said: bytes, later: bytes = b"") -> bytes:
    """All that comes back for these bytes, until the server or nobody has more to say."""

    async def run() -> bytes:
        server = Server(handler)
        port = await server.open()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(said)
        if later:
            await asyncio.sleep(0.3)
            writer.write(later)
        found = b""
        try:
            async with asyncio.timeout(1.5):
                while data := await reader.read(1 << 16):
                    found += data
        except TimeoutError:
            found += b"<open>"
        writer.close()
        await server.close()
        return found

    return asyncio.run(run())


def post(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def test_requests_of_a_connection_one_after_another() -> None:
    found = talk(echo, post("/a", b"one") + post("/b", b"two"))
    assert found.count(b"HTTP/1.1 200") == 2
    assert found.index(b"POST one") < found.index(b"POST two")
    assert found.endswith(b"<open>")


def test_what_a_handler_raises_is_not_told() -> None:
    found = talk(echo, post("/fails", b"") + post("/b", b"two"))
    assert b"HTTP/1.1 500" in found and b"secret" not in found
    assert b"POST two" in found


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 20_000, b"431"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", b"400"),
    ],
)
def test_no_request_is_refused_and_ends_the_connection(said: bytes, status: bytes) -> None:
    found = talk(echo, said)
    assert found.startswith(b"HTTP/1.1 " + status)
    assert not found.endswith(b"<open>")


def test_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_BODY_BYTES", 1000)
    assert talk(echo, post("/", b"x" * 1001)).startswith(b"HTTP/1.1 413")
    assert talk(echo, post("/", b"x" * 1000)).startswith(b"HTTP/1.1 200")

    async def never(_: Request) -> Answer:
        await asyncio.Event().wait()
        raise AssertionError

    assert talk(never, post("/", b""), b"x" * 5000) == b""
    assert talk(never, post("/", b"")) == b"<open>"
