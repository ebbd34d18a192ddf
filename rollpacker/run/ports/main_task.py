"""The main task does slow work, one piece (a *deed*) at a time, in the order of asking.

any thread --later(deed)--> inbox --next()--> the controller's loop runs it to its end
any thread --fail(error)--> inbox, or the future that the main task waits for
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from rollpacker.bus import Routes
from rollpacker.core.commands import Finish

logger = logging.getLogger(__name__)

Deed = Callable[[], Awaitable[None]]


class MainTask:
    """Queues slow work from any thread for the main task, which does it on the event loop."""

    def __init__(self) -> None:
        self.awaited: asyncio.Future[Any] | None = None
        """A future that the main task awaits and that no command of the core settles, such as an
        evaluation's responses. If the run fails, it gets the error. None: nothing is awaited."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._why_at_once: BaseException | None = None
        self._lock = threading.Lock()
        self._together: list[tuple[Callable[..., object], tuple[object, ...]]] = []
        """Functions, each with its arguments, that the event loop is to call when it next wakes up.
        Adding the first one wakes it."""
        self._inbox: asyncio.Queue[Deed | Finish | BaseException] = asyncio.Queue()

    def open(self) -> None:
        """Use the running event loop, and the task that calls this as main task, from now on."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._together = []  # what the one before did not come to is lost with it
        self._loop = loop
        self._loop.set_exception_handler(self._on_loop_error)
        self._task = asyncio.current_task()
        self.raise_why()

    def routes(self) -> Routes:
        return {Finish: self._put}

    def post(self, function: Callable[..., object], *arguments: object) -> None:
        """Have the event loop call this function soon. Thread-safe."""
        assert self._loop is not None, "the run has not begun"
        self._loop.call_soon_threadsafe(function, *arguments)

    def post_together(self, function: Callable[..., object], *arguments: object) -> None:
        """Have the event loop call this function, after all others posted by this method. The loop
        is woken once for all of them, as waking is a system call. Thread-safe."""
        with self._lock:
            self._together.append((function, arguments))
            is_first = len(self._together) == 1
        if is_first:
            self.post(self._call_together)

    def _call_together(self) -> None:
        with self._lock:
            calls, self._together = self._together, []
        for function, arguments in calls:
            try:
                function(*arguments)
            except Exception as error:  # the others are called, as if each were posted by itself
                self.fail(error)

    def later(self, deed: Deed) -> None:
        """Have the main task do this piece of work after all that was asked for before.
        Thread-safe."""
        self._put(deed)

    def fail(self, error: BaseException) -> None:
        """End the run with this error, whatever slow work waits for. Used on the event loop; other
        threads `post` it."""
        if self.awaited is not None and not self.awaited.done():
            self.awaited.set_exception(error)
        else:
            self._inbox.put_nowait(error)

    def end_at_once(self, error: BaseException) -> None:
        """End the run with this error, leaving the work at hand unfinished. Thread-safe."""
        self._why_at_once = error
        if self._task is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed: the run is over
                self.post(self._task.cancel)

    def raise_why(self) -> None:
        """Raise the error with which the run is to end at once, if `end_at_once` was called."""
        if self._why_at_once is not None:
            raise self._why_at_once from None

    async def next(self, within_s: float) -> Deed | Finish | None:
        """Returns the next piece of work (a function), or the command `Finish`. None if nothing
        comes within `within_s` seconds. Raises the error given to `fail`."""
        try:
            item = await asyncio.wait_for(self._inbox.get(), within_s)
        except TimeoutError:
            return None
        if isinstance(item, BaseException):
            raise item
        return item

    def _put(self, item: Deed | Finish) -> None:
        self.post(self._inbox.put_nowait, item)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """End the run if a function given to `post` raised; other errors are only logged."""
        error = context.get("exception")
        if "handle" in context and error is not None:
            self.fail(error)
        else:
            logger.warning("%s", context["message"], exc_info=error)
