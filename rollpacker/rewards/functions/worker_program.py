"""The program of a worker process: one reward function, called as the controller asks.

controller -- requests, pickled --> worker: SETUP once, then CALLs
controller <-- replies, JSON ------ worker: a value, or why there is none

Requests hold the values of a row's columns, which may be of any type; they come from this
process's own parent over an inherited socket. A blocking function is called in the main thread, one
call at a time. An async one runs in the worker's own event loop, any number of calls at once.
Imports no more than it needs.
"""

from __future__ import annotations

import inspect
import os
import pickle
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from rollpacker.imports import ImportSpecError, is_async, load_function
from rollpacker.rewards.functions.logged import NAMES as LOGGERS
from rollpacker.rewards.functions.logged import Logged
from rollpacker.rewards.functions.returned import WrongReturn, error_of, values_of
from rollpacker.workers.answering import Controller, connected
from rollpacker.workers.kinds import CALL, CANCEL, READY, REFUSED, STOPPED
from rollpacker.workers.line import Line

if TYPE_CHECKING:
    import asyncio

    from rollpacker.workers.frames import Message


def main(line: int | Line) -> None:
    """Answer the run's requests until it hangs up. `line`: the connection, or its descriptor."""
    controller = connected(line)
    hello, function = _load(controller.request().payload)
    if function is None:
        controller.reply(0, hello, REFUSED)
        return
    controller.reply(0, hello, READY)
    if hello["is_async"]:
        import asyncio

        asyncio.run(_serve_async(controller, function))
    while True:
        request = controller.request()
        controller.reply(request.number, function.answer(request.payload))


# -- the function ------------------------------------------------------------------------


def _load(payload: bytes) -> tuple[dict[str, Any], LoadedFunction | None]:
    """Load the function that the first request describes. Returns a reply (the function's name,
    parameters and file) and the function; if loading fails, a reply with the reason, and None."""
    try:
        spec, is_factory, arguments = pickle.loads(payload)
        function = pickle.loads(spec) if isinstance(spec, bytes) else load_function(spec)
        if is_factory:
            function = function(**arguments)
            arguments = {}
    except ImportSpecError as error:
        return {"refused": str(error)}, None
    except BaseException as error:  # whatever the user's module does: it is theirs to be told
        if type(error).__name__ == "RewardError":
            return {"refused": str(error), "complete": True}, None
        told = error_of(error)
        return {"refused": f"{told['error']}: {told['said']}{told['where']}"}, None
    hello = {
        "name": getattr(function, "__name__", None),
        "is_async": is_async(function),
        "parameters": _parameters(function),
        "file": _file_of(function),
    }
    return hello, LoadedFunction(function, arguments, is_built_in=is_factory)


def _file_of(function: Callable[..., Any]) -> str | None:
    """The file of the module that defines the function or its class. None: unknown."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    return getattr(module, "__file__", None)


def _parameters(function: Callable[..., Any]) -> list[dict[str, Any]] | None:
    """Name and kind of each parameter and whether it has a default. None for a function whose
    signature cannot be read."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    return [
        {"name": p.name, "kind": p.kind.name, "has_default": p.default is not p.empty}
        for p in parameters
    ]


class LoadedFunction:
    """A reward function with the arguments that the config gives it."""

    def __init__(
        self, function: Callable[..., Any], arguments: dict[str, Any], *, is_built_in: bool = False
    ) -> None:
        self._function = function
        self._arguments = arguments
        parameters = _parameters(function) or ()
        named = [one["name"] for one in parameters]
        self._loggers = [name for name in LOGGERS if name in named]
        self._takes_all = not is_built_in and any(p["kind"] == "VAR_KEYWORD" for p in parameters)
        self._loop: asyncio.AbstractEventLoop | None = None

    def _call(self, payload: bytes) -> tuple[Any, _Call]:
        shape, count, args, kwargs, progress = pickle.loads(payload)
        logged = Logged(count, progress)
        as_trl = shape == "trl" and self._takes_all
        kwargs |= logged.arguments(LOGGERS if as_trl else self._loggers)
        call = _Call(shape, count, logged)
        return self._function(*args, **kwargs | self._arguments), call

    def answer(self, payload: bytes) -> dict[str, Any]:
        """Call the function on the samples of a request, and return the reply: the values that the
        function returned, or its error."""
        started = time.perf_counter()
        try:
            returned, call = self._call(payload)
            if not inspect.isawaitable(returned):
                return _answered(call, returned, started)
        except BaseException as error:  # an exit ends this call, not the worker
            return _not_answered(error)
        import asyncio

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(self._awaited(returned, call, started))

    async def answer_async(self, payload: bytes) -> dict[str, Any]:
        """Call a coroutine function and return the reply, as `answer` does."""
        started = time.perf_counter()
        try:
            returned, call = self._call(payload)
        except BaseException as error:
            return _not_answered(error)
        return await self._awaited(returned, call, started)

    async def _awaited(self, returned: Any, call: _Call, started: float) -> dict[str, Any]:
        try:
            return _answered(call, await returned, started)
        except BaseException as error:  # an exit would end the loop
            return _not_answered(error)


class _Call(NamedTuple):
    shape: str
    num_samples: int
    logged: Logged


def _answered(call: _Call, returned: Any, started: float) -> dict[str, Any]:
    values = values_of(call.shape, returned, call.num_samples)
    seconds = time.perf_counter() - started
    return {"values": values, "seconds": seconds, **call.logged.reply()}


def _not_answered(error: BaseException) -> dict[str, Any]:
    return {"wrong": str(error)} if isinstance(error, WrongReturn) else dict(error_of(error))


async def _serve_async(controller: Controller, function: LoadedFunction) -> None:
    import asyncio

    loop = asyncio.get_running_loop()
    tasks: dict[int, asyncio.Task[None]] = {}
    controller.send = controller.line.post

    async def answer(call: int, payload: bytes) -> None:
        reply = await function.answer_async(payload)
        del tasks[call]
        controller.reply(call, reply)

    def heard(request: Message) -> None:
        call = request.number
        if request.kind == CALL:
            tasks[call] = loop.create_task(answer(call, request.payload))
        elif request.kind == CANCEL:
            if call in tasks:
                tasks[call].cancel()
            controller.reply(call, {}, STOPPED)

    controller.line.attach(loop, heard, lambda: os._exit(0))
    await loop.create_future()
