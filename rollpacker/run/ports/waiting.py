"""Connects threads to the event loop: runs calls that may hang, and gathers engine outputs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar, cast

from rollpacker.core.events import Event, SampleFailed
from rollpacker.engines.engine import EngineError, Response

logger = logging.getLogger(__name__)

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


class Collecting:
    """Gathers outputs that the core need not know (an evaluation's). `done`: the responses."""

    def __init__(self, count: int, loop: asyncio.AbstractEventLoop) -> None:
        self.done: asyncio.Future[list[Response]] = loop.create_future()
        self._loop = loop
        self._missing = count
        self._responses: list[Response] = []

    def add(self, event: Event, response: Response | None) -> None:
        """Add an engine's output, in the engine's thread. `response`: None if the sample failed."""
        self._missing -= 1
        if isinstance(event, SampleFailed):
            logger.warning("evaluation: %s: %s", event.sample, event.reason)
        if response is not None:
            self._responses.append(response)
        if not self._missing:
            self._loop.call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        if not self.done.done():
            self.done.set_result(self._responses)


async def failures(
    function: Callable[..., object],
    arguments: Mapping[K, tuple[Any, ...]],
    what: str,
    within_s: float | None,
) -> dict[K, BaseException]:
    """Call `function` with each of these tuples of arguments at once, in threads. Returns, by key,
    the errors of calls that failed, and an `EngineError` for those that took more than `within_s`
    seconds (None: no limit). `what`: what the call does, for this error."""
    doing = {key: in_daemon_thread(function, *of_one) for key, of_one in arguments.items()}
    if doing:
        await asyncio.wait(doing.values(), timeout=within_s)
    failed: dict[K, BaseException] = {}
    for key, one in doing.items():
        if not one.done():
            failed[key] = EngineError(f"it did not {what} within {within_s:g} s")
        elif (error := one.exception()) is not None:
            failed[key] = error
    return failed


def in_daemon_thread(function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
    """Call the function in a thread. Returns a future of the result. A call that hangs does not
    keep the process alive."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast("T", result))

    def work() -> None:
        result, failure = None, None
        try:
            result = function(*arguments)
        except Exception as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=work, name=function.__name__, daemon=True).start()
    return future
