"""The server under clients that say anything at all."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from rollpacker.serving import http
from rollpacker.serving.http import (
    Limits,
    Request,
    Response,
    Route,
    Server,
    Starlette,
    StreamingResponse,
)


async def echo(request: Request) -> Response:
    if request.url.path == "/fails":
        raise RuntimeError("a secret")
    return Response(request.method.encode() + b" " + await request.body())


def app(handler: Callable[[Request], Awaitable[Response]]) -> Starlette:
    return Starlette(routes=[Route("/{path:path}", handler, methods=["GET", "POST"])])


def talk(
    handler: Callable[[Request], Awaitable[Response]],
    said: bytes,
    later: bytes = b"",
    *,
    ends: bool = False,
    **settings: Any,
) -> bytes:
    """All that comes back for these bytes, until nobody has more to say or, if it `ends` the
    connection, the server."""

    async def run() -> bytes:
        server = Server(app(handler), **settings)
        port = await server.open()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(said)
        if later:
            await asyncio.sleep(0.3)
            writer.write(later)
        found = b""
        quiet, most = 0, 300 if ends else 10  # rounds of this loop, in which the server is, too
        with contextlib.suppress(ConnectionError):  # it ends so where more was said
            reading = asyncio.ensure_future(reader.read(1 << 16))
            while quiet < most:
                quiet += 1
                if (await asyncio.wait({reading}, timeout=0.1))[0]:
                    if not (data := reading.result()):
                        break
                    found, quiet = found + data, 0
                    reading = asyncio.ensure_future(reader.read(1 << 16))
            else:
                reading.cancel()
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
    found = talk(echo, post("/fails", b""), ends=True)
    assert b"HTTP/1.1 500" in found and b"secret" not in found
    assert not found.endswith(b"<open>")


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 20_000, b"400"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", b"400"),
    ],
)
def test_no_request_is_refused_and_ends_the_connection(said: bytes, status: bytes) -> None:
    found = talk(echo, said, ends=True)
    assert found.startswith(b"HTTP/1.1 " + status)
    assert not found.endswith(b"<open>")


def test_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_BODY_BYTES", 1000)
    assert talk(echo, post("/", b"x" * 1001)).startswith(b"HTTP/1.1 413")
    assert talk(echo, post("/", b"x" * 1000)).startswith(b"HTTP/1.1 200")

    chunks = b"3e8\r\n" + b"x" * 1000 + b"\r\n1\r\nx\r\n0\r\n\r\n"
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert talk(echo, head + chunks).startswith(b"HTTP/1.1 413")


def test_what_comes_before_an_answer_is_not_read_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that floods while its request is handled is stopped by TCP, or disconnected."""
    monkeypatch.setattr(http, "MAX_BODY_BYTES", 1000)
    monkeypatch.setattr(http, "MAX_HEAD_BYTES", 1000)

    async def never(_: Request) -> Response:
        await asyncio.Event().wait()
        raise AssertionError

    assert talk(never, post("/", b""), b"x" * 5000, ends=True) == b""
    assert talk(never, post("/", b"")) == b"<open>"


def members_only(head: Request) -> Response | None:
    return None if http.has_token(head, "t") else Response(b"who are you?", 401)


def test_who_may_not_ask_is_told_before_the_body_which_nobody_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def never(_: Request) -> Response:
        raise AssertionError("not for strangers")

    whole = post("/", b"x" * 5000)
    found = talk(never, whole[:-4000], admit=members_only)
    assert found.startswith(b"HTTP/1.1 401")
    assert found.endswith(b"who are you?<open>"), "the rest of the body may still come"
    found = talk(never, whole[:-4000], whole[-4000:] + whole, admit=members_only)
    assert found.count(b"who are you?") == 2, "the next request is one of its own"
    asks = whole[:-5000].replace(b"Host", b"Expect: 100-continue\r\nHost")
    found = talk(never, asks, admit=members_only)
    assert found.startswith(b"HTTP/1.1 401"), "it is not asked to go on"
    monkeypatch.setattr(http, "MAX_BODY_BYTES", 1000)
    monkeypatch.setattr(http, "MAX_HEAD_BYTES", 500)
    found = talk(never, whole[:-5000], b"x" * 2000, ends=True, admit=members_only)
    assert found.endswith(b"who are you?"), "nor is more of it read than of others"


def test_who_may_ask_is_handled_with_the_body() -> None:
    said = post("/", b"one").replace(b"Host", b"Authorization: Bearer t\r\nHost")
    found = talk(echo, said + said, admit=members_only)
    assert found.count(b"POST one") == 2 and found.endswith(b"<open>")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (b"", b""),
        (b"POST / HTTP/1.1\r\nHost: x\r\n", b""),
        (post("/", b"x" * 10)[:-5], b""),
        (post("/", b"one"), b"POST one"),
    ],
    ids=["nothing", "half a head", "half a body", "no second request"],
)
def test_who_says_nothing_more_is_let_go_of(said: bytes, told: bytes) -> None:
    found = talk(echo, said, ends=True, limits=Limits(head_s=1.0, body_s=1.0))
    assert found.endswith(told) and not found.endswith(b"<open>")


def test_a_drip_of_headers_buys_no_time() -> None:
    """The head is to be there in time, whatever comes of it meanwhile."""
    began = b"GET / HTTP/1.1\r\nHost: x\r\n"
    found = talk(echo, began, b"a: b\r\n", ends=True, limits=Limits(head_s=0.6))
    assert found == b""


def test_a_request_that_takes_long_is_not_let_go_of() -> None:
    async def slow(_: Request) -> Response:
        await asyncio.sleep(2.0)
        return Response(b"at last")

    found = talk(slow, post("/", b""), ends=True, limits=Limits(head_s=1.0, body_s=1.0))
    assert found.endswith(b"at last")


def test_where_there_are_too_many_the_idle_one_goes_and_who_is_served_stays() -> None:
    """Five connections that say nothing keep nobody out; three requests at once do."""
    release = asyncio.Event()
    held_ones: list[Request] = []

    async def held(request: Request) -> Response:
        held_ones.append(request)
        await release.wait()
        return Response(b"served")

    async def run() -> None:
        server = Server(app(held), limits=Limits(connections=3))
        port = await server.open()
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
        asking = []
        for number in range(3):
            asking.append(await asyncio.open_connection("127.0.0.1", port))
            asking[-1][1].write(post("/", b""))
            while len(held_ones) <= number:
                await asyncio.sleep(0.01)
        for reader, writer in idle:
            with contextlib.suppress(ConnectionError):  # it was reset
                assert await reader.read() == b""
            writer.close()
        reader, late = await asyncio.open_connection("127.0.0.1", port)
        assert (await reader.read()).startswith(b"HTTP/1.1 503")
        late.close()
        release.set()
        for reader, writer in asking:
            assert (await reader.read(1 << 16)).endswith(b"served")
            writer.close()
        await server.close()

    asyncio.run(run())


def test_a_stranger_who_keeps_asking_goes_before_an_idle_member() -> None:
    """Requests that are refused do not make a connection any younger."""

    async def run() -> None:
        server = Server(app(echo), admit=members_only, limits=Limits(connections=2))
        port = await server.open()
        stranger = await asyncio.open_connection("127.0.0.1", port)
        stranger[1].write(post("/", b""))
        await stranger[0].readuntil(b"who are you?")
        member = await asyncio.open_connection("127.0.0.1", port)
        stranger[1].write(post("/", b""))
        await stranger[0].readuntil(b"who are you?")
        late = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionError):  # it was reset
            assert await stranger[0].read() == b""
        said = post("/", b"one").replace(b"Host", b"Authorization: Bearer t\r\nHost")
        for reader, writer in (member, late):
            writer.write(said)
            await reader.readuntil(b"POST one")
            writer.close()
        stranger[1].close()
        await server.close()

    asyncio.run(run())


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("who", ["client", "server"])
def test_a_handler_ends_with_its_client_or_its_server(is_stream: bool, who: str) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def pieces() -> AsyncIterator[bytes]:
        yield b"first"
        await wait()

    async def handler(_: Request) -> Response:
        if is_stream:
            return StreamingResponse(pieces())
        await wait()
        raise AssertionError

    async def run() -> None:
        server = Server(app(handler))
        reader, writer = await asyncio.open_connection("127.0.0.1", await server.open())
        writer.write(post("/", b""))
        await begun.wait()
        if is_stream:
            await reader.readuntil(b"first")
        if who == "client":
            writer.close()
            await ended.wait()
        await server.close()
        assert ended.is_set()
        writer.close()

    asyncio.run(run())


def test_nothing_is_logged_of_clients_that_go_or_talk_nonsense() -> None:
    code = """if True:
        import asyncio
        from rollpacker.serving.http import Server
        async def app(scope, receive, send):
            await receive()
        async def run():
            server = Server(app)
            port = await server.open()
            for said in (b"nonsense\\r\\n\\r\\n", b"GET / HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n"):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(said)
                await writer.drain()
                writer.transport.abort()
            await asyncio.sleep(0.1)
            await server.close()
        asyncio.run(run())
    """
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")
