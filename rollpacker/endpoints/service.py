"""Keeps for the callers of a service whether it is up, busy or down, and how long they wait for it.

A caller awaits `ready`, makes one attempt, and calls `succeeded` or `failed`. After a failure it
awaits `pause`, longer each time, and begins again.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable

from rollpacker.endpoints.breaker import Breaker

Probe = Callable[[], Awaitable[bool]]
"""An async function that sends a service the simplest request. Returns whether it was answered."""


class Service:
    """Keeps whether one service is up, busy or down, for all its callers in one event loop."""

    def __init__(
        self,
        name: str,
        *,
        outage_s: float,
        failures: int = 5,
        probe_every_s: float = 5.0,
        first_pause_s: float = 0.5,
        max_pause_s: float = 30.0,
    ) -> None:
        """`name`: name of the service in messages. `outage_s`: seconds that callers wait for a
        service that is down or busy. After `failures` in a row it counts as down, and is tried
        every `probe_every_s` seconds. The pause after a failure begins with `first_pause_s` and
        doubles up to `max_pause_s`."""
        self.name = name
        self.outage_s = outage_s
        self.breaker = Breaker(name, failures=failures, probe_every_s=probe_every_s)
        self.waited_s = 0.0
        """Seconds that callers have waited for the service so far, added up."""
        self._probe_every_s = probe_every_s
        self._first_pause_s, self._max_pause_s = first_pause_s, max_pause_s
        self._not_before = 0.0
        self._random = random.Random(os.urandom(8))

    def outage(self) -> str | None:
        """Return a sentence on the service's present outage, or None if there is none."""
        return self.breaker.outage()

    async def ready(self, started: float, probe: Probe | None = None) -> bool:
        """Wait while the service is down or has asked for a pause. Returns whether the caller may
        make an attempt; False if its time is over. `started`: the loop's time when the caller began
        to wait. While the service is down, one caller at a time tries it with `probe`, or if that
        is None by its own attempt."""
        loop = asyncio.get_running_loop()
        since = loop.time()
        try:
            while True:
                was_down = self.outage() is not None
                if not await self.breaker.ready(self._until(started)):
                    return False
                while (pause_s := self._not_before - loop.time()) > 0:
                    if self._not_before > self._until(started):
                        return False
                    await asyncio.sleep(pause_s)
                if probe is None or not was_down or self.outage() is None:
                    return loop.time() < self._until(started)
                if await probe():
                    self.succeeded()
        finally:
            self.waited_s += loop.time() - since

    def _until(self, started: float) -> float:
        """Return the loop time after which the caller that began at `started` waits no longer. One
        that begins late in an outage may still wait for one probe, to see the service return."""
        since = self.breaker.failing_since
        if since is None:
            return started + self.outage_s
        newcomer = started + min(2 * self._probe_every_s, self.outage_s)
        return max(since + self.outage_s, newcomer)

    def succeeded(self) -> None:
        """Record that the service answered."""
        self.breaker.succeeded()

    def failed(self, why: str, *, after_s: float | None = None) -> None:
        """Record that an attempt was not answered. `after_s`: pause that the service asked for."""
        self.breaker.failed(why)
        if after_s is not None:
            now = asyncio.get_running_loop().time()
            self._not_before = max(self._not_before, now + after_s)

    async def pause(self, num_failed: int) -> None:
        """Wait before the next attempt of a request that failed `num_failed` times. The pause is
        shortened at random, so that callers do not come back all at once."""
        longest_s = min(self._first_pause_s * 2 ** min(num_failed - 1, 10), self._max_pause_s)
        pause_s = self._random.uniform(0.5, 1.0) * longest_s
        self.waited_s += pause_s
        await asyncio.sleep(pause_s)
