"""The main task: what takes long, one thing at a time, in the order in which it was asked for.

any thread --later(deed)--> inbox --next()--> the controller's loop runs it to its end
any thread --fail(error)--> inbox, or what the main task waits for from the engine
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from rollpacker.bus import Routes
from rollpacker.core.commands import Finish

logger = logging.getLogger(__name__)

Deed = Callable[[], Awaitable[None]]


class MainTask:
    """The way from other threads, and from the ports of slow commands, to the event loop."""

    def __init__(self) -> None:
        self.awaited: asyncio.Future[Any] | None = None
        """What the main task waits for that no command brings; a failure goes there."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inbox: asyncio.Queue[Deed | Finish | BaseException] = asyncio.Queue()

    def open(self) -> None:
        """Belong to the running loop from now on."""
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._on_loop_error)

    def routes(self) -> Routes:
        return {Finish: self._put}

    def post(self, function: Callable[..., object], *arguments: object) -> None:
        """Call it on the event loop, soon. Thread-safe."""
        assert self._loop is not None, "the run has not begun"
        self._loop.call_soon_threadsafe(function, *arguments)

    def later(self, deed: Deed) -> None:
        """Do it after all that was asked for before. Thread-safe."""
        self._put(deed)

    def fail(self, error: BaseException) -> None:
        """End the run with what a part died of, whatever the main task waits for. On the event
        loop only; other threads `post` it."""
        if self.awaited is not None and not self.awaited.done():
            self.awaited.set_exception(error)
        else:
            self._inbox.put_nowait(error)

    async def next(self, within_s: float) -> Deed | Finish | None:
        """What is to be done next; None if nothing was asked for within these seconds.

        Raises what a part died of.
        """
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
        """A callback of ours that raised ends the run; what others left behind is only logged."""
        error = context.get("exception")
        if "handle" in context and error is not None:
            self.fail(error)
        else:
            logger.warning("%s", context["message"], exc_info=error)
