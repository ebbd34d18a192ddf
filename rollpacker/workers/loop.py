"""One thread with an event loop that serves the lines (message sockets) to all processes started by
this one. The thread runs while some object that needs it holds a `LoopUse`. A function called in
the loop must not wait, since all other lines wait meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Result = TypeVar("Result")

_lock = threading.Lock()
_running: _Running | None = None


class LoopUse:
    """A claim on the common event loop until `end`: its thread runs while there are claims."""

    def __init__(self) -> None:
        """Claim the common event loop. Starts its thread if there is no other claim."""
        global _running
        with _lock:
            if _running is None:
                running = _Running(asyncio.SelectorEventLoop())
                running.thread.start()  # where that fails, the next user tries again
                _running = running
            _running.num_users += 1
            self._running = _running
        self._is_ended = False

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The common event loop of this process's lines, which runs in a thread of its own."""
        return self._running.loop

    def soon(self, function: Callable[..., object], *arguments: Any) -> None:
        """Have the event loop call the function, from any thread. Does nothing on a closed loop."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *arguments)

    def end(self) -> None:
        """Give up the claim on the event loop, from any thread. The last one ends the loop's
        thread, and waits for its end unless in that thread. Further calls are harmless."""
        global _running
        with _lock:
            if not self._is_ended:
                self._is_ended = True
                self._running.num_users -= 1
            is_last = self._running.num_users == 0
            if is_last and _running is self._running:
                _running = None
                self.loop.call_soon_threadsafe(self.loop.stop)
        if is_last and threading.current_thread() is not self._running.thread:
            self._running.thread.join()


class _Running:
    """The common event loop, its thread, and the number of claims on it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.num_users = 0
        self.loop = loop
        self.thread = threading.Thread(
            target=_run, args=(loop,), name="rollpacker-lines", daemon=True
        )


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()


def at_once(
    work: Sequence[Callable[[], Result]], within_s: float | None = None
) -> list[Result | Exception]:
    """Call these functions at the same time, each in a daemon thread. Returns for each its result
    or exception, or `TimeoutError` after `within_s` seconds; None: no limit."""
    late = TimeoutError(f"no answer within {within_s} s")
    found: list[Result | Exception] = [late] * len(work)

    def do(number: int) -> None:
        try:
            found[number] = work[number]()
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=do, args=(n,), daemon=True) for n in range(len(work))]
    until = None if within_s is None else time.monotonic() + within_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(None if until is None else max(0.0, until - time.monotonic()))
    return list(found)
