"""What runs in a worker process: one reward function, called as the controller asks.

controller -- requests, pickled --> worker: LOAD once, then CALLs
controller <-- replies, JSON ------ worker: what a function returned is never unpickled

A blocking function is called in the main thread, one call at a time. An async one runs in the
worker's own event loop, any number of calls at once. Light: it imports no more than it needs.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import pickle
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rollpacker.imports import ImportSpecError, load_function
from rollpacker.rewards.functions.returned import Value, WrongReturn, error_of, values_of

if TYPE_CHECKING:
    import asyncio

HEADER = struct.Struct(">BQI")
"""Before each message, both ways: kind, number of the call, bytes that follow."""
LOAD, CALL, CANCEL, REPLY, ACK = range(1, 6)
MAX_REPLY_BYTES = 64 << 20


class Frames:
    """Cuts a stream of bytes into messages."""

    def __init__(self, max_bytes: int | None = None) -> None:
        self._buffer = bytearray()
        self._max_bytes = max_bytes

    def feed(self, data: bytes) -> list[tuple[int, int, bytes]]:
        """The messages that are complete now. Raises `ValueError` for one that is too long."""
        self._buffer += data
        found = []
        while len(self._buffer) >= HEADER.size:
            kind, call, length = HEADER.unpack_from(self._buffer)
            if self._max_bytes is not None and length > self._max_bytes:
                raise ValueError(f"a message of {length} bytes")
            end = HEADER.size + length
            if len(self._buffer) < end:
                break
            found.append((kind, call, bytes(self._buffer[HEADER.size : end])))
            del self._buffer[:end]
        return found


def main(connection_fd: int, lifeline_fd: int) -> None:
    """Start the worker as a child and guard it. Does not return."""
    from rollpacker.rewards.functions import guardian

    connection = socket.socket(fileno=connection_fd)
    guardian.start(lambda: serve(connection), connection, lifeline_fd)


def serve(connection: socket.socket) -> None:
    """Answer requests until the controller hangs up."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    controller = _Controller(connection)
    controller.reply(0, {"pid": os.getpid()})
    requests = controller.requests()
    _, _, payload = next(requests)
    hello, function = _load(payload)
    controller.reply(0, hello)
    if function is None:
        return
    if hello["is_async"]:
        import asyncio

        asyncio.run(_serve_async(controller, function))
    for kind, call, payload in requests:
        if kind == CALL:
            controller.reply(call, function.answer(payload))


class _Controller:
    """The other end of the line. When it hangs up, this process ends."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._pid = os.getpid()

    def requests(self) -> Iterator[tuple[int, int, bytes]]:
        while True:
            kind, call, length = HEADER.unpack(self._receive(HEADER.size))
            yield kind, call, self._receive(length)

    def _receive(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            piece = self.connection.recv(min(count - len(data), 1 << 20))
            if not piece:
                os._exit(0)
            data += piece
        return bytes(data)

    def reply(self, call: int, reply: dict[str, Any], kind: int = REPLY) -> None:
        if os.getpid() != self._pid:  # a child that the function forked came back here too
            os._exit(0)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the function may have closed or replaced it
                stream.flush()
        payload = json.dumps(reply, allow_nan=False).encode()
        try:
            self.connection.sendall(HEADER.pack(kind, call, len(payload)) + payload)
        except BrokenPipeError:
            os._exit(0)


# -- the function ------------------------------------------------------------------------


def _load(payload: bytes) -> tuple[dict[str, Any], LoadedFunction | None]:
    """What the controller needs to know of the function, or why it cannot be had."""
    try:
        request = pickle.loads(payload)
        function = load_function(request["spec"])
        if request["factory"]:
            function = function(**request["arguments"])
            request["arguments"] = {}
    except ImportSpecError as error:
        return {"refused": str(error)}, None
    except BaseException as error:  # whatever the user's module does: it is theirs to be told
        told = error_of(error)
        is_own = type(error).__name__ == "RewardError"
        if is_own:
            return {"refused": str(error), "complete": True}, None
        return {"refused": f"{told['error']}: {told['said']}{told['where']}"}, None
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )
    hello = {
        "name": getattr(function, "__name__", type(function).__name__),
        "is_async": is_async,
        "parameters": _parameters(function),
    }
    return hello, LoadedFunction(function, request["arguments"])


def _parameters(function: Callable[..., Any]) -> list[dict[str, Any]] | None:
    """Name, kind and whether there is a default. None: this function does not tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    return [
        {"name": p.name, "kind": p.kind.name, "has_default": p.default is not p.empty}
        for p in parameters
    ]


class LoadedFunction:
    """The function and the arguments that the config gives it."""

    def __init__(self, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
        self._function = function
        self._arguments = arguments
        self._loop: asyncio.AbstractEventLoop | None = None

    def _call(self, payload: bytes) -> tuple[Any, str, int]:
        shape, count, args, kwargs = pickle.loads(payload)
        return self._function(*args, **kwargs | self._arguments), shape, count

    def answer(self, payload: bytes) -> dict[str, Any]:
        """Call it, whatever comes of that."""
        started = time.perf_counter()
        try:
            returned, shape, count = self._call(payload)
            if inspect.isawaitable(returned):
                returned = self._wait_for(returned)
            return _answered(values_of(shape, returned, count), started)
        except WrongReturn as wrong:
            return {"wrong": str(wrong)}
        except BaseException as error:  # an exit ends this call, not the worker
            return error_of(error)

    def _wait_for(self, returned: Any) -> Any:
        import asyncio

        if self._loop is None:
            self._loop = asyncio.new_event_loop()

        async def wait() -> tuple[Any, BaseException | None]:
            try:
                return await returned, None
            except BaseException as error:  # an exit would end the loop
                return None, error

        value, error = self._loop.run_until_complete(wait())
        if error is not None:
            raise error
        return value

    async def answer_async(self, payload: bytes) -> dict[str, Any]:
        """As `answer`, for a coroutine function."""
        started = time.perf_counter()
        try:
            returned, shape, count = self._call(payload)
            return _answered(values_of(shape, await returned, count), started)
        except WrongReturn as wrong:
            return {"wrong": str(wrong)}
        except BaseException as error:  # an exit ends this call, not the worker
            return error_of(error)


def _answered(values: list[Value], started: float) -> dict[str, Any]:
    return {"values": values, "seconds": time.perf_counter() - started}


async def _serve_async(controller: _Controller, function: LoadedFunction) -> None:
    import asyncio

    loop = asyncio.get_running_loop()
    tasks: dict[int, asyncio.Task[None]] = {}
    frames = Frames()

    async def answer(call: int, payload: bytes) -> None:
        reply = await function.answer_async(payload)
        del tasks[call]
        controller.reply(call, reply)

    def read() -> None:
        try:
            data = controller.connection.recv(1 << 20, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        if not data:
            os._exit(0)
        for kind, call, payload in frames.feed(data):
            if kind == CALL:
                tasks[call] = loop.create_task(answer(call, payload))
            elif kind == CANCEL:
                if call in tasks:
                    tasks[call].cancel()
                controller.reply(call, {}, ACK)

    loop.add_reader(controller.connection.fileno(), read)
    await loop.create_future()
