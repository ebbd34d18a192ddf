"""A service with SandboxFusion's protocol on loopback, which can misbehave in many ways.

Honest answers come from really running the program: in one of our own sandboxes, or (`plain`,
for programs that the tests wrote themselves) in an ordinary process. `toy` runs nothing, for tests
about the way there and back.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import gzip
import json
import re
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rollpacker.sandbox.sandbox import Limits, RunResult, Sandbox, Status

Runner = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
Behaviour = Callable[["FusionStub", dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


class FusionStub:
    """Behaves as the next entry of `script` says, or else as `behaviour`."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.behaviour: Behaviour = honest
        self.script: deque[Behaviour] = deque()
        self.requests: list[tuple[dict[str, str], dict[str, Any]]] = []
        """Headers (names in lower case) and body of each."""
        self.gone_away = 0
        """Callers that closed the connection before their answer."""
        self.port = 0
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def programs(self) -> list[str]:
        return [body["code"] for _, body in self.requests]

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Refuse connections, and cut those that are there."""
        assert self._server is not None
        self._server.close()
        for writer in list(self._open):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            while await self._serve_one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._open.discard(writer)
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """False if the caller went away before the answer."""
        request = await _read_request(reader)
        self.requests.append(request)
        behave = self.script.popleft() if self.script else self.behaviour
        answer = asyncio.ensure_future(behave(self, request[1], writer))
        leaving = asyncio.ensure_future(reader.read(1))
        await asyncio.wait((answer, leaving), return_when=asyncio.FIRST_COMPLETED)
        is_answered = answer.done()
        self.gone_away += not is_answered
        answer.cancel()
        leaving.cancel()
        await asyncio.gather(answer, leaving, return_exceptions=True)
        return is_answered and answer.exception() is None


@asynccontextmanager
async def fusion_stub(runner: Runner | None = None) -> AsyncIterator[FusionStub]:
    stub = FusionStub(runner or toy)
    await stub.start()
    try:
        yield stub
    finally:
        await stub.stop()


async def _read_request(reader: asyncio.StreamReader) -> tuple[dict[str, str], Any]:
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").strip().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    headers[":request"] = first
    body = await reader.readexactly(int(headers["content-length"]))
    return headers, json.loads(body)


# --- honest ---------------------------------------------------------------------------------------


async def plain(request: dict[str, Any]) -> dict[str, Any]:
    """In an ordinary process, without any isolation."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in request["files"].items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(base64.b64decode(content))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-c", request["code"]),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=folder,
        )
        stdin = request["stdin"].encode()
        try:
            async with asyncio.timeout(request["run_timeout"]):
                stdout, stderr = await process.communicate(stdin)
            status, code = "Finished", process.returncode
        except TimeoutError:
            process.kill()
            await process.wait()
            status, code, stdout, stderr = "TimeLimitExceeded", None, b"", b""
        except asyncio.CancelledError:
            process.kill()
            raise
    return reply(status, code, stdout.decode(errors="replace"), stderr.decode(errors="replace"))


async def toy(request: dict[str, Any]) -> dict[str, Any]:
    """Knows only the first `print` of a word, which is all that tests about anything else need."""
    word = re.search(r"print\((['\"]?)(\w+)\1\)", request["code"])
    is_probe = "importlib" in request["code"]
    return reply("Finished", 0, f"{word[2] if word else ''}\n" + "\n\n" * is_probe)


def in_sandbox(box: Sandbox) -> Runner:
    """In one of our own sandboxes."""

    async def run(request: dict[str, Any]) -> dict[str, Any]:
        limits = Limits(
            wall_s=request["run_timeout"],
            memory_bytes=request["memory_limit_MB"] << 20,
            disk_bytes=8 << 20,  # the protocol has no word for it: the service's own setting
        )
        files = {name: base64.b64decode(body) for name, body in request["files"].items()}
        result = await box.run(request["code"], stdin=request["stdin"], files=files, limits=limits)
        return _as_reply(result)

    return run


def _as_reply(result: RunResult) -> dict[str, Any]:
    if result.status is Status.SANDBOX_ERROR:
        return {"status": "SandboxError", "message": result.detail, "run_result": None}
    is_late = result.status is Status.TIMEOUT
    code = result.exit_code
    return reply(
        "TimeLimitExceeded" if is_late else "Finished",
        None if is_late else -9 if code is None else code,
        result.stdout.decode(errors="replace"),
        result.stderr.decode(errors="replace"),
        result.wall_s,
    )


def reply(
    status: str, code: int | None, stdout: str = "", stderr: str = "", seconds: float = 0.01
) -> dict[str, Any]:
    is_good = status == "Finished" and code == 0
    return {
        "status": "Success" if is_good else "Failed",
        "message": "",
        "compile_result": None,
        "run_result": {
            "status": status,
            "execution_time": seconds,
            "return_code": code,
            "stdout": stdout,
            "stderr": stderr,
        },
        "executor_pod_name": None,
        "files": {},
    }


async def honest(stub: FusionStub, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    await _send(writer, json.dumps(await stub.runner(request)).encode())


# --- not honest -----------------------------------------------------------------------------------


def answers(body: Any, code: int = 200, **headers: str) -> Behaviour:
    """With this body (bytes as they are, all else as JSON) and status."""

    async def behave(_: FusionStub, __: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        await _send(writer, raw, code, named)

    return behave


def unless(is_poison: Callable[[str], bool], otherwise: Behaviour) -> Behaviour:
    """Honest, but not to such programs."""

    async def behave(
        stub: FusionStub, request: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        chosen = otherwise if is_poison(request["code"]) else honest
        await chosen(stub, request, writer)

    return behave


async def hangs(_: FusionStub, __: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3600)


async def drips(_: FusionStub, __: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """One byte at a time, for ever."""
    writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n{"status": "')
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.01)


async def cuts(_: FusionStub, __: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """The stream in the middle."""
    writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"status": "Succ')
    await writer.drain()
    writer.transport.abort()


async def talks_nonsense(_: FusionStub, __: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(b"\x00\x01\x02 this is no HTTP\r\n\r\n")
    await writer.drain()
    writer.close()


def endless(begin: bytes) -> Behaviour:
    """A body of 10 GB, as far as anybody reads it."""

    async def behave(_: FusionStub, __: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10000000000\r\n\r\n" + begin)
        while not writer.transport.is_closing():
            writer.write(b"x" * 65536)
            await writer.drain()

    return behave


@functools.cache
def _bomb() -> bytes:
    return gzip.compress(b'{"status": "Success"' + b" " * (64 << 20), compresslevel=1)


async def gzip_bomb(_: FusionStub, __: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    await _send(writer, _bomb(), 200, {"Content-Encoding": "gzip"})


async def _send(
    writer: asyncio.StreamWriter,
    body: bytes,
    code: int = 200,
    headers: dict[str, str] | None = None,
) -> None:
    head = f"HTTP/1.1 {code} X\r\nContent-Length: {len(body)}\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    writer.write(head.encode() + b"\r\n" + body)
    await writer.drain()
