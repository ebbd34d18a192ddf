"""A circuit breaker: while an endpoint is down, callers wait in line instead of calling it.

The circuit is closed while the endpoint is up. After N failures in a row it is open, and every
`probe_every_s` seconds the first caller in line goes ahead as a probe. A success, of a probe or of
an earlier call, closes it again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque

from rollpacker.endpoints.http import one_line

logger = logging.getLogger(__name__)

MAX_REASON = 200
"""Number of characters of a failure's reason that are repeated in messages."""


class Breaker:
    """State of one endpoint: up or down. It is used in one event loop at a time. Every call for
    which `ready` returned True should end in `succeeded` or `failed`. A cancelled call may do
    without: it changes nothing, since the clock alone decides when the next probe goes out."""

    def __init__(self, name: str, *, failures: int = 5, probe_every_s: float = 5.0) -> None:
        """`name`: the endpoint in messages. After `failures` in a row the circuit is open: calls
        wait, and every `probe_every_s` seconds one goes ahead as a probe."""
        if failures < 1:
            raise ValueError(f"failures must be at least 1, not {failures}")
        if not probe_every_s > 0:
            raise ValueError(f"probe_every_s must be more than 0, not {probe_every_s}")
        self.name = name
        self._limit = failures
        self._probe_every_s = probe_every_s
        self._failures = 0
        self._failing_since = 0.0
        self.why = ""
        """The reason why the last failed call failed. Empty before the first failure."""
        self._is_open = False
        self._probe_at = 0.0
        self._line: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        """Timer of the next probe (a call let through to try). None while no call waits in line."""

    @property
    def failing_since(self) -> float | None:
        """Event loop time of the first failure since the last success; None without a failure."""
        return self._failing_since if self._failures else None

    async def ready(self, until: float) -> bool:
        """Wait in line while the circuit is open. Returns True if the caller may call the endpoint:
        the circuit is closed, or this is a probe. Returns False at the loop's time `until`."""
        if not self._is_open:
            return True
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._line.append(turn)
        self._set_timer()
        wait_s = None if math.isinf(until) else max(0.0, until - loop.time())
        try:
            await asyncio.wait((turn,), timeout=wait_s)
        except asyncio.CancelledError:
            if turn.done() and self._is_open:  # it was the probe; the next in line takes its turn
                self._probe_at = loop.time()
                self._set_timer()
            raise
        finally:
            self._leave(turn)
        return turn.done()

    def succeeded(self) -> None:
        """Record an answer of the endpoint. The circuit closes; calls in line go ahead in order."""
        self._failures = 0
        if not self._is_open:
            return
        self._is_open = False
        logger.warning("%s answers again after %s", self.name, _duration(self._down_s()))
        while self._line:
            self._line.popleft().set_result(None)
        self._stop_timer()

    def failed(self, why: str) -> None:
        """Record that the endpoint gave no useful answer; `why` in a few words."""
        now = _now()
        why = one_line(why)
        self.why = why if len(why) <= MAX_REASON else why[: MAX_REASON - 3] + "..."
        if self._failures == 0:
            self._failing_since = now
        self._failures += 1
        if self._is_open or self._failures < self._limit:
            return
        self._is_open = True
        self._probe_at = now + self._probe_every_s
        logger.warning(
            "%s does not answer (%s); trying again every %g s",
            self.name,
            self.why,
            self._probe_every_s,
        )

    def outage(self) -> str | None:
        """Return a sentence on the outage, its length and last reason; None: the endpoint is up."""
        if not self._is_open:
            return None
        return f"{self.name} has been down for {_duration(self._down_s())} ({self.why})"

    def _down_s(self) -> float:
        return max(0.0, _now() - self._failing_since)

    def _set_timer(self) -> None:
        self._stop_timer()
        if self._line:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(self._probe_at, self._let_probe_go)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _let_probe_go(self) -> None:
        self._probe_at = _now() + self._probe_every_s
        self._line.popleft().set_result(None)
        self._set_timer()

    def _leave(self, turn: asyncio.Future[None]) -> None:
        if turn in self._line:
            self._line.remove(turn)
            if not self._line:
                self._stop_timer()


def _now() -> float:
    """Return the running event loop's time in seconds, or outside of a loop the clock it uses."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
