"""The calls of a function, the workers of its pool, and how a call can fail."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollpacker.workers.worker import WorkerProcess


class Overran(Exception):
    """The call took longer than its limit."""

    def __init__(
        self, *, shared: bool, own: bool = True, told: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        self.shared = shared
        """Other calls ran in the same worker, which hung: it may have been one of them."""
        self.own = own
        """Whether it was this call's own limit that passed, and not that of another call in the
        same worker."""
        self.told = told or {}
        """The worker's last words on a call that it was told to give up."""


class WorkerLost(Exception):
    """The worker ended by itself, or was stopped; the message says which and how."""

    def __init__(self, what: str, *, how: str, stopped: bool, left_s: float) -> None:
        """`left_s`: so much of the call's limit was left."""
        super().__init__(what)
        self.how, self.stopped, self.left_s = how, stopped, left_s


class NoWorker(Exception):
    """No worker could be started; the message says why."""


@dataclass(eq=False, slots=True)
class PoolCall:
    number: int
    payload: bytes
    limit_s: float
    alone: bool
    """No other call may run in its worker."""
    future: asyncio.Future[dict[str, Any]]
    worker: PoolWorker | None = None
    timer: asyncio.TimerHandle | None = None
    began: float = 0.0
    """The loop's time when a worker got the call."""
    whose: object = None
    """Calls of the same may bring down their worker for the same reason."""

    def lost(self, what: str, now: float, *, how: str = "", stopped: bool = False) -> None:
        """Settle the call: its worker was gone at loop time `now`."""
        left_s = self.limit_s - (now - self.began)
        self.settle(WorkerLost(what, how=how, stopped=stopped, left_s=left_s))

    def settle(self, result: dict[str, Any] | Exception) -> None:
        if self.timer is not None:
            self.timer.cancel()
        if self.future.done():
            return
        if isinstance(result, Exception):
            self.future.set_exception(result)
        else:
            self.future.set_result(result)


@dataclass(eq=False, slots=True)
class PoolWorker:
    process: WorkerProcess
    ready: bool
    idle_since: float
    calls: dict[int, PoolCall] = field(default_factory=dict)
    given_up: set[int] = field(default_factory=set)
    """The calls that go on although nobody waits for their reply."""
    draining: bool = False
    """Whether the worker takes no more calls."""
    was_stopped: bool = False
    num_kept: int = 0
    """Number of things that calls have begun in the worker and later calls go on with. They cannot
    go on elsewhere."""
    num_hung: int = 0
    """Calls that were given up and went on all the same."""
    gone: str = ""
    """How it ended, once it has."""

    @property
    def is_idle(self) -> bool:
        return not (self.calls or self.given_up or self.num_kept)

    @property
    def num_calls(self) -> int:
        return len(self.calls) + len(self.given_up)

    def has_room(self, call: PoolCall, capacity: int) -> bool:
        if not self.ready or self.draining:
            return False
        if call.alone or any(other.alone for other in self.calls.values()):
            return self.num_calls == 0
        return self.num_calls < capacity

    def __str__(self) -> str:
        return str(self.process.child)
