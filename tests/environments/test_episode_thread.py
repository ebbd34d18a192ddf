"""An episode's thread whose own work fails, outside of the user's function."""

import asyncio
from typing import Any

import pytest

from rollpacker.environments.calls import EpisodeThread


class ShortOnce:
    """A loop that cannot be told of the first result: there is no memory for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self.num_told = loop, 0

    def call_soon_threadsafe(self, *what: Any) -> None:
        self.num_told += 1
        if self.num_told == 1:
            raise MemoryError
        self.loop.call_soon_threadsafe(*what)


def test_who_waits_is_told_and_the_thread_goes_on() -> None:
    async def run() -> None:
        thread = EpisodeThread()
        thread._loop = ShortOnce(asyncio.get_running_loop())  # type: ignore[assignment]
        future: Any = asyncio.get_running_loop().create_future()
        thread._latest = future
        thread._jobs.put((lambda: 1, future))
        with pytest.raises(MemoryError, match=r"environment\.memory_mb"):
            await asyncio.wait_for(future, 60)
        thread._loop = asyncio.get_running_loop()
        value, _ = await asyncio.wait_for(thread.call(lambda: 2), 60)
        assert value == 2
        thread.end()

    asyncio.run(run())
