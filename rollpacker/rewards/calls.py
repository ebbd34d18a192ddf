"""Calling a function that may be slow, stuck, blocking or async, without stopping the event loop.

Blocking functions run in daemon threads: Python cannot end a thread, so one that hangs is given
up, and it must not keep the process from exiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import queue
import threading
from collections.abc import Awaitable, Callable
from typing import Any
from weakref import WeakKeyDictionary

MAX_CALLS = 32
"""Calls of one function side by side."""
MAX_STUCK = 64
"""Calls past their deadline that have not returned: more are not added to them."""

_Job = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", Callable[[], Any]]


class StuckError(RuntimeError):
    """So many calls hang past their deadline that no further one is made."""


class DeadlineCaller:
    """Calls of one function, a bounded number side by side, each with a deadline."""

    def __init__(self, name: str, timeout_s: float, is_async: bool) -> None:
        self._timeout_s = timeout_s
        self._is_async = is_async
        self._threads = _DaemonThreads(name)
        self._active: set[object] = set()
        """Calls that have not returned, in time or late. Changed from several threads, one atomic
        operation each."""
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            WeakKeyDictionary()
        )

    async def call(self, function: Callable[[], Any]) -> Any:
        """What `function` returns, awaited if it is awaitable.

        Raises what it raises (an exit as `RuntimeError`), `TimeoutError` after the deadline, which
        begins when the call does, and `StuckError`.
        """
        loop = asyncio.get_running_loop()
        if loop not in self._slots:
            self._slots[loop] = asyncio.Semaphore(MAX_CALLS)
        async with self._slots[loop]:
            if len(self._active) >= MAX_CALLS + MAX_STUCK:
                raise StuckError(f"{len(self._active)} earlier calls hang past their deadline")
            return await self._call(loop, function)

    async def _call(self, loop: asyncio.AbstractEventLoop, function: Callable[[], Any]) -> Any:
        deadline = loop.time() + self._timeout_s
        if self._is_async:
            result = function()
        else:
            result = await _until(deadline, self._threads.submit(self._tracked(function)))
        if inspect.isawaitable(result):
            return await _until(deadline, asyncio.ensure_future(self._awaited(result)))
        return result

    def _tracked(self, function: Callable[[], Any]) -> Callable[[], Any]:
        token = object()
        self._active.add(token)

        def run() -> Any:
            try:
                return function()
            finally:
                self._active.discard(token)

        return run

    async def _awaited(self, result: Awaitable[Any]) -> Any:
        token = object()
        self._active.add(token)
        try:
            return await result
        except (SystemExit, KeyboardInterrupt) as error:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        finally:
            self._active.discard(token)


async def _until(deadline: float, future: asyncio.Future[Any]) -> Any:
    """The future's result; `TimeoutError` at the deadline, without waiting for it to give in."""
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()

    def wake(_: object = None) -> None:
        if not waiter.done():
            waiter.set_result(None)

    future.add_done_callback(wake)
    timer = loop.call_at(deadline, wake)
    try:
        await waiter
    except asyncio.CancelledError:
        future.cancel()
        raise
    finally:
        timer.cancel()
        future.remove_done_callback(wake)
    if not future.done():
        future.add_done_callback(_ignore)
        future.cancel()
        raise TimeoutError
    if future.cancelled():
        raise RuntimeError("the function was cancelled")
    return future.result()


def _ignore(future: asyncio.Future[Any]) -> None:
    """Look at what a call that was given up ended with, so that nobody reports it as lost."""
    if not future.cancelled():
        future.exception()


class _DaemonThreads:
    """Runs calls side by side; a thread that is free takes the next call, else a new one starts."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_free = 0

    def submit(self, call: Callable[[], Any]) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        with self._lock:
            start = self._num_free == 0
            if not start:
                self._num_free -= 1
        self._jobs.put((loop, future, call))
        if start:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return future

    def _work(self) -> None:
        while True:
            loop, future, call = self._jobs.get()
            result: Any = None
            error: Exception | None = None
            try:
                result = call()
            except BaseException as raised:  # whatever it is, it ends this call and not the run
                error = _carried(raised)
            with self._lock:
                self._num_free += 1
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
                loop.call_soon_threadsafe(_settle, future, result, error)
            del loop, future, call, result, error


def _carried(error: BaseException) -> Exception:
    """The error in a form that a future can carry to the loop without ending it."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    wrapped = RuntimeError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
