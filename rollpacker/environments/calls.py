"""Calls the functions of one episode: async functions in the event loop, blocking ones in a thread
that the episode has for itself.

A thread, since a call that waits or hangs must not hold up other episodes of the process; always
the same thread, since some libraries refuse to use in one thread what was opened in another
(sqlite3). Runs in a worker process.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import queue
import resource
import threading
import time
from collections.abc import Callable
from typing import Any

from rollpacker.imports import is_async

Job = tuple[Callable[[], Any], "asyncio.Future[tuple[Any, float]]"]


class Exited(Exception):
    """The function ended with an exception that would end a program, such as SystemExit."""


class GivenUp(BaseException):
    """Raised in a thread to end a call whose result is not wanted any more."""


class Calls:
    """Calls the functions of one episode's environment or tools, one after another."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Seconds that the episode's functions took, without any waiting for the thread."""
        self._thread: EpisodeThread | None = None

    async def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the function and return its result, awaited if need be. Raises what the function
        raises, or `Exited`. Cancelling the call of a blocking function interrupts the function, and
        then waits for its end, which may never come."""
        try:
            if is_async(function):
                return await self._timed(function(*args, **kwargs))
            began = time.perf_counter()
            try:
                value, seconds = await self._in_thread(lambda: function(*args, **kwargs))
            except Exception:
                self.seconds += time.perf_counter() - began
                raise
            self.seconds += seconds
            return await self._timed(value) if inspect.isawaitable(value) else value
        except (SystemExit, KeyboardInterrupt, GivenUp) as error:
            raise Exited(f"{type(error).__name__}: {error}") from error

    async def _timed(self, awaitable: Any) -> Any:
        began = time.perf_counter()
        try:
            return await awaitable
        finally:
            self.seconds += time.perf_counter() - began

    async def _in_thread(self, function: Callable[[], Any]) -> tuple[Any, float]:
        if self._thread is None:
            self._thread = EpisodeThread()
        thread = self._thread
        future = thread.call(function)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            self._thread = None
            thread.interrupt()
            await asyncio.wait({future})
            future.exception()  # nobody wants to know
            thread.end()
            raise

    def end(self) -> None:
        if self._thread is not None:
            self._thread.end()


class EpisodeThread(threading.Thread):
    """A thread that calls functions one after another. It ends with its process at the latest."""

    def __init__(self) -> None:
        """Start the thread, which then waits for calls."""
        super().__init__(daemon=True)
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        MEMORY.make_room_for_thread()
        self._latest: asyncio.Future[tuple[Any, float]] | None = None
        self.start()

    def call(self, function: Callable[[], Any]) -> asyncio.Future[tuple[Any, float]]:
        """Queue a call. The future gets the function's result and its duration in seconds, or its
        error."""
        future: asyncio.Future[tuple[Any, float]] = self._loop.create_future()
        self._latest = future
        self._jobs.put((function, future))
        return future

    def run(self) -> None:
        """Execute the queued calls until `end`; see `threading.Thread.run`."""
        while True:
            try:
                return self._work()
            except BaseException as error:  # memory was short outside of the user's code
                MEMORY.make_room_for_thread()
                if self._latest is not None:
                    short = MemoryError(f"{error} (environment.memory_mb may be too little)")
                    self._loop.call_soon_threadsafe(_fail, self._latest, short)

    def _work(self) -> None:
        with contextlib.suppress(GivenUp):  # it may come when the call has just ended
            while (job := self._jobs.get()) is not None:
                function, future = job
                began = time.perf_counter()
                try:
                    done: Any = function()
                except BaseException as error:  # whatever it is, the episode's loop is told
                    done = error
                    if not isinstance(error, Exception):
                        done = Exited(f"{type(error).__name__}: {error}")
                    self._loop.call_soon_threadsafe(_fail, future, done)
                    del error
                else:
                    seconds = time.perf_counter() - began
                    self._loop.call_soon_threadsafe(_settle, future, (done, seconds))
                del job, function, future, done

    def interrupt(self) -> None:
        """Raise `GivenUp` in the function that runs, once it executes Python code again."""
        assert self.ident is not None
        ident = ctypes.c_ulong(self.ident)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(GivenUp))

    def end(self) -> None:
        """End the thread once the calls queued so far are done. Does not wait for that."""
        self._jobs.put(None)


def _settle(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if isinstance(error, StopIteration):  # which no future can hold
        error = RuntimeError(f"StopIteration: {error}")
    if not future.done():
        future.set_exception(error)


class _Memory:
    """The limit on the memory of this process's own data. There is none until `limit` sets one."""

    def __init__(self) -> None:
        self._limit: int | None = None
        stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
        self._stack = stack if 0 < stack < 1 << 30 else 8 << 20
        """Bytes of a thread's stack. Each thread that starts raises the limit on memory by that."""

    def limit(self, num_bytes: int) -> None:
        """Limit the memory that this process can write to, to its present size plus `num_bytes`.
        Where the system does not report the present size, there is no limit."""
        with contextlib.suppress(OSError, StopIteration), open("/proc/self/status") as file:
            line = next(line for line in file if line.startswith("VmData:"))
            self._limit = (int(line.split()[1]) << 10) + num_bytes
            self._set()

    def make_room_for_thread(self) -> None:
        if self._limit is not None:
            self._limit += self._stack
            self._set()

    def _set(self) -> None:
        assert self._limit is not None
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        with contextlib.suppress(ValueError, OSError):  # one from outside is lower
            resource.setrlimit(resource.RLIMIT_DATA, (self._limit, hard))


MEMORY = _Memory()
