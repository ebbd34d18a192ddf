"""One sandbox for a test module, in an event loop of its own thread; and what many tests ask it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rollpacker.rewards.code.grading import grade
from rollpacker.rewards.reward import Failed, Scored
from rollpacker.sandbox import Limits, Sandbox, SandboxUnavailable, open_sandbox
from tests.sandbox.attacks.harness import STOOD_STILL

AT_A_TIME = 4


class Box:
    """Grades from outside of the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sandbox: Sandbox) -> None:
        self.loop = loop
        self.sandbox = sandbox

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(240)

    def grade(
        self, completion: str, tests: Any, *, wall_s: float = 5.0, **arguments: Any
    ) -> Scored | Failed:
        limits = Limits(wall_s=wall_s)
        for _ in range(5):
            found = self.run(grade(completion, tests, self.sandbox, limits=limits, **arguments))
            if not (isinstance(found, Failed) and any(why in found.reason for why in STOOD_STILL)):
                break  # else there is no verdict for the machine's fault: it is asked for again
        return found

    def grade_all(
        self, answers: Iterable[tuple[str, Any]], *, wall_s: float = 5.0
    ) -> list[Scored | Failed]:
        """Of (completion, tests), a few at a time."""
        limits = Limits(wall_s=wall_s)
        turns = asyncio.Semaphore(AT_A_TIME)

        async def one(completion: str, tests: Any) -> Scored | Failed:
            async with turns:
                return await grade(completion, tests, self.sandbox, limits=limits)

        async def every() -> list[Scored | Failed]:
            return await asyncio.gather(*(one(*answer) for answer in answers))

        return self.run(every())


@contextmanager
def opened() -> Iterator[Box]:
    """Skips, and says why, where no sandbox can be had."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    context = open_sandbox(workers=2)
    try:
        try:
            sandbox = asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result(60)
        except SandboxUnavailable as error:
            pytest.skip(f"NOT TESTED, no sandbox here: {str(error).splitlines()[0]}")
        try:
            yield Box(loop, sandbox)
        finally:
            asyncio.run_coroutine_threadsafe(context.__aexit__(None, None, None), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
