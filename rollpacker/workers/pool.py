"""The worker processes of one function or environment, among which calls are distributed.

A call waits for a worker, runs in it, and returns the worker's reply. It raises `NoWorker` if none
could be started, and `Overran` or `WorkerLost` if the worker was too slow or ended: then the worker
is replaced.

A blocking function has one call at a time in each worker, an async one many. There is one worker at
first; waiting calls start more, and workers idle for a minute end. There are no threads.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollpacker.workers.child import BY_SIGNAL
from rollpacker.workers.kinds import CALL, CANCEL, READY, REFUSED, STOPPED
from rollpacker.workers.served import START_S
from rollpacker.workers.worker import WorkerProcess


class Overran(Exception):
    """Raised if a call in a worker took longer than its limit in seconds."""

    def __init__(
        self, *, shared: bool, own: bool = True, told: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        self.shared = shared
        """Whether other calls ran in the same worker, which hung: any of them may be the cause."""
        self.own = own
        """Whether this call took too long itself, not another call in the same worker."""
        self.told = told or {}
        """What the worker reported when it was told to give this call up. Empty if nothing."""


class WorkerLost(Exception):
    """Raised if the worker of a call ended or was stopped; the message tells which and how."""

    def __init__(self, what: str, *, how: str, stopped: bool, left_s: float) -> None:
        """`left_s`: seconds that were left of the call's limit. `how`: how the worker ended."""
        super().__init__(what)
        self.how, self.stopped, self.left_s = how, stopped, left_s


class NoWorker(Exception):
    """Raised for a call if no worker could be started for it; the message tells why."""


@dataclass(eq=False, slots=True)
class PoolCall:
    number: int
    payload: bytes
    limit_s: float
    alone: bool
    """Whether no other call may run in the same worker at the same time."""
    future: asyncio.Future[dict[str, Any]]
    worker: PoolWorker | None = None
    timer: asyncio.TimerHandle | None = None
    began: float = 0.0
    """The event loop's time in seconds at which a worker got the call."""
    whose: object = None
    """What the call is for, such as an episode's prompt, which is suspected if its worker dies."""

    def lost(self, what: str, now: float, *, how: str = "", stopped: bool = False) -> None:
        """Have the call raise `WorkerLost` with message `what`. `now`: the event loop's time;
        `how`: how its worker ended, in words; `stopped`: whether a signal held the worker."""
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
    """Numbers of the calls that still run in this worker, though nobody awaits their replies."""
    draining: bool = False
    """Whether the worker gets no more calls, since it is to end."""
    was_stopped: bool = False
    num_kept: int = 0
    """Number of objects, such as episodes, that live in the worker between calls, so that their
    later calls have to run in it as well."""
    num_hung: int = 0
    """Number of given-up calls in this worker that have not ended in time."""
    gone: str = ""
    """How the worker ended, in words. Empty while it lives."""

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


logger = logging.getLogger(__name__)

MAX_ASYNC_CALLS = 1000
"""The most calls of an async function that run in one worker at once."""
IDLE_S = 60.0
"""Seconds without a call after which a worker process ends, unless it is the last."""
GROW_AFTER_S = 0.02
"""Seconds for which calls wait for a free worker before another worker is started."""
WATCH_EVERY_S = 0.25
"""Seconds between two checks of busy workers. One stopped by a signal at two is replaced."""
ANSWER_WITHIN_S = 0.25
"""Seconds without an answer to a cancelled call after which a worker's loop counts as blocked."""
GIVE_IN_WITHIN_S = {False: 0.1, True: 1.0}
"""Seconds that a given-up call may still run before its worker is ended, for functions that are not
async (False) and async ones (True)."""
HELD_S = 0.25
"""Seconds that a timer must be late for this process's own event loop to count as held up."""
MAX_FAILED_STARTS = 3
"""Number of failed starts of workers in a row after which waiting calls are given up."""

_Then = Callable[[PoolCall, PoolWorker], None]


class WorkerPool:
    """The worker processes of one function or environment, used in the event loop that makes it.

    A subclass may choose the worker of a call (`_place`) and their number (`_num_to_start`).
    """

    kind = "reward"
    """Word for what the workers run, which stands before the pool's name in logs and errors."""

    def __init__(
        self,
        name: str,
        start: Callable[[str], WorkerProcess],
        *,
        said: Callable[[str], None],
        is_async: bool,
        max_workers: int,
        workers: list[WorkerProcess],
    ) -> None:
        """`start` makes a worker process of the given name; `workers` are ready to be used. `said`
        is called with each line that a worker prints. `max_workers`: the most at once."""
        self.loop = asyncio.get_running_loop()
        self._name = name
        self._start_process = start
        self._said = said
        self._is_async = is_async
        self._capacity = MAX_ASYNC_CALLS if is_async else 1
        self._max_workers = max_workers
        self._numbers = itertools.count(1)
        self._names = itertools.count(1 + len(workers))
        self._workers: list[PoolWorker] = []
        self._ending: set[asyncio.Task[None]] = set()
        self._waiting: deque[PoolCall] = deque()
        self._num_failed_starts = 0
        self._grow_timer: asyncio.TimerHandle | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._watch_timer: asyncio.TimerHandle | None = None
        for process in workers:
            self._add(process, ready=True)

    # -- calls ----------------------------------------------------------------------------

    async def call(self, payload: bytes, limit_s: float, *, alone: bool = False) -> dict[str, Any]:
        """Send a call with this content to a worker and return the reply. `limit_s`: the most
        seconds that it may take in a worker, waiting for a free one not counted. `alone`: no other
        call runs in the worker meanwhile. Raises `Overran`, `WorkerLost` and `NoWorker`."""
        call = self._made(payload, limit_s, alone=alone)
        self._waiting.append(call)
        self._dispatch()
        return await self._answer(call)

    def _made(self, payload: bytes, limit_s: float, *, alone: bool = False) -> PoolCall:
        future: asyncio.Future[dict[str, Any]] = self.loop.create_future()
        return PoolCall(next(self._numbers), payload, limit_s, alone, future)

    async def _answer(self, call: PoolCall) -> dict[str, Any]:
        try:
            return await call.future
        except asyncio.CancelledError:
            self._cancel(call)
            raise

    def _dispatch(self) -> None:
        while self._waiting:
            call = self._waiting[0]
            if call.future.done():  # cancelled
                self._waiting.popleft()
                continue
            worker = self._place(call)
            if worker is None:
                self._plan_growth()
                return
            self._waiting.popleft()
            self._begin(call, worker)

    def _place(self, call: PoolCall) -> PoolWorker | None:
        """Return the worker that is to get the call. None: no worker has room for it."""
        free = (w for w in self._workers if w.has_room(call, self._capacity))
        return next(free, None)

    def _begin(self, call: PoolCall, worker: PoolWorker) -> None:
        call.worker = worker
        call.began = self.loop.time()
        worker.calls[call.number] = call
        worker.process.send(CALL, call.number, call.payload)
        call.payload = b""
        self._give_until(call.limit_s, self._overran, call, worker)
        self._keep_watching()

    def _give_until(self, within_s: float, then: _Then, call: PoolCall, worker: PoolWorker) -> None:
        """Call `then` if the call is not answered within this many seconds."""
        due_s = self.loop.time() + within_s
        call.timer = self.loop.call_at(due_s, self._due, due_s, within_s, then, call, worker)

    def _due(
        self, due_s: float, within_s: float, then: _Then, call: PoolCall, worker: PoolWorker
    ) -> None:
        """Call `then`, unless this event loop was late: the reply may then lie unread in the pipe,
        or the worker may have waited for room there, so the call gets the lost seconds more."""
        held_s = self.loop.time() - due_s
        if held_s > HELD_S:
            self._give_until(min(held_s, within_s), then, call, worker)
        else:
            then(call, worker)

    def _message(self, worker: PoolWorker, kind: int, number: int, content: dict[str, Any]) -> None:
        if kind == STOPPED:
            self._reacted(worker, number, content)
            return
        call = worker.calls.pop(number, None)
        if kind in (READY, REFUSED):
            self._loaded(worker, content)
        elif call is not None:
            call.settle(content)
        else:
            worker.given_up.discard(number)
        self._freed(worker)

    def _freed(self, worker: PoolWorker) -> None:
        if worker.is_idle:
            worker.idle_since = self.loop.time()
            if worker.draining:
                self._retire(worker)
            elif self._idle_timer is None and len(self._workers) > 1:
                self._idle_timer = self.loop.call_later(IDLE_S, self._retire_idle)
        self._dispatch()

    # -- calls that do not end well ---------------------------------------------------------

    def _overran(self, call: PoolCall, worker: PoolWorker) -> None:
        if call.future.done():
            return
        if worker.process.child.is_stopped():
            self._lose_stopped(worker)
        elif self._is_async:
            worker.process.send(CANCEL, call.number)
            self._give_until(self._answer_within_s(), self._hangs, call, worker)
        else:
            self._hangs(call, worker)

    def _answer_within_s(self) -> float:
        return ANSWER_WITHIN_S

    def _hangs(self, call: PoolCall, worker: PoolWorker) -> None:
        if call.future.done():
            return
        logger.warning(
            "%s %s: a call in worker %s took longer than %g s; it is ended and replaced",
            self.kind,
            self._name,
            worker,
            call.limit_s,
        )
        shared = worker.num_calls > 1
        calls = self._retire(worker, f"worker {worker} hung")
        for one in calls:
            one.settle(Overran(shared=shared, own=one is call))

    def _reacted(self, worker: PoolWorker, number: int, content: dict[str, Any]) -> None:
        """Have a call that an async worker gave up raise `Overran`; `content`: what it told."""
        call = worker.calls.pop(number, None)
        if call is not None:
            call.settle(Overran(shared=False, told=content))
            self._give_up(worker, number)

    def _cancel(self, call: PoolCall) -> None:
        worker = call.worker
        if call.timer is not None:
            call.timer.cancel()
        if worker is None:
            self._dispatch()
        elif worker.calls.pop(call.number, None) is not None:
            if self._is_async:
                worker.process.send(CANCEL, call.number)
            self._give_up(worker, call.number)

    def _give_up(self, worker: PoolWorker, number: int) -> None:
        worker.given_up.add(number)
        self.loop.call_later(
            GIVE_IN_WITHIN_S[self._is_async], self._must_have_ended, worker, number
        )

    def _must_have_ended(self, worker: PoolWorker, number: int) -> None:
        if number in worker.given_up and worker in self._workers:
            worker.given_up.discard(number)
            worker.draining = True
            self._freed(worker)

    def _watch(self) -> None:
        """Replace each busy worker that a signal holds at this check and at the one before."""
        self._watch_timer = None
        busy = [worker for worker in self._workers if worker.num_calls or not worker.ready]
        for worker in busy:
            is_stopped = worker.process.child.is_stopped()
            if is_stopped and worker.was_stopped:
                self._lose_stopped(worker)
            worker.was_stopped = is_stopped
        if busy:
            self._keep_watching()

    def _keep_watching(self) -> None:
        if self._watch_timer is None:
            self._watch_timer = self.loop.call_later(WATCH_EVERY_S, self._watch)

    def _lose_stopped(self, worker: PoolWorker) -> None:
        how = f"worker {worker} {BY_SIGNAL}"
        if worker.ready:
            logger.warning("%s %s: %s; it is ended and replaced", self.kind, self._name, how)
        else:
            self._start_failed(how)
        for call in self._retire(worker, how):
            call.lost(how, self.loop.time(), stopped=True)

    def _ended(self, worker: PoolWorker) -> None:
        if worker in self._workers:
            self._retire(worker, f"worker {worker} ended by itself", by_itself=True)

    def _lose_ended(self, worker: PoolWorker, calls: list[PoolCall], how: str) -> None:
        what = f"worker {worker} ended by itself ({how})"
        if worker.ready:
            logger.warning("%s %s: %s; it is replaced", self.kind, self._name, what)
        else:
            self._start_failed(what)
        for call in calls:
            call.lost(what, self.loop.time(), how=how)

    # -- workers ------------------------------------------------------------------------------

    def _add(self, process: WorkerProcess, *, ready: bool) -> PoolWorker:
        worker = PoolWorker(process, ready, self.loop.time())
        self._workers.append(worker)
        process.attach(
            self.loop,
            heard=lambda kind, number, content: self._message(worker, kind, number, content),
            said=self._said,
            ended=lambda: self._ended(worker),
        )
        return worker

    def _plan_growth(self) -> None:
        if not self._workers:
            self._grow()
        elif self._grow_timer is None and len(self._workers) < self._max_workers:
            self._grow_timer = self.loop.call_later(GROW_AFTER_S, self._grow)

    def _grow(self) -> None:
        self._grow_timer = None
        for _ in range(self._num_to_start()):
            try:
                process = self._start_process(f"{self._name}-{next(self._names)}")
            except OSError as error:
                self._start_failed(str(error), for_good=True)
                return
            worker = self._add(process, ready=False)
            self.loop.call_later(START_S, self._must_be_ready, worker)
            self._keep_watching()

    def _num_to_start(self) -> int:
        """Return how many workers to start, for waiting calls: at most doubling the ready ones."""
        num_ready = sum(worker.ready for worker in self._workers)
        num_starting = len(self._workers) - num_ready
        room = min(self._max_workers, num_ready + max(num_ready, 1)) - len(self._workers)
        return min(room, len(self._waiting) - num_starting)

    def _loaded(self, worker: PoolWorker, hello: dict[str, Any]) -> None:
        if "refused" in hello:
            self._start_failed(hello["refused"], for_good=True)
            self._retire(worker)
        else:
            worker.ready = True
            self._num_failed_starts = 0

    def _must_be_ready(self, worker: PoolWorker) -> None:
        if not worker.ready and worker in self._workers:
            self._start_failed(f"worker {worker} was not ready within {START_S:g} s")
            self._retire(worker)

    def _start_failed(self, why: str, *, for_good: bool = False) -> None:
        """Count a failed start of a worker. Give up the waiting calls if no worker is ready and
        none will be: after several failures in a row, or one `for_good`, which would fail again."""
        logger.warning("%s %s: a worker was not started: %s", self.kind, self._name, why)
        self._num_failed_starts += not for_good
        if not for_good and self._num_failed_starts < MAX_FAILED_STARTS:
            return
        if not any(worker.ready for worker in self._workers):
            self.give_up_waiting(why)

    def give_up_waiting(self, why: str) -> None:
        """Have all calls that wait for a worker raise `NoWorker`."""
        waiting, self._waiting = self._waiting, deque()
        for call in waiting:
            call.settle(NoWorker(why))

    def _retire_idle(self) -> None:
        self._idle_timer = None
        now = self.loop.time()
        for worker in self._workers[:0:-1]:
            if worker.ready and worker.is_idle and now - worker.idle_since >= IDLE_S:
                self._retire(worker)
        if len(self._workers) > 1:
            self._idle_timer = self.loop.call_later(IDLE_S / 4, self._retire_idle)

    def _retire(
        self, worker: PoolWorker, gone: str = "", *, by_itself: bool = False
    ) -> list[PoolCall]:
        """End a worker; `gone` is the reason. Returns its calls, for the caller to answer; but if
        it ended `by_itself`, `_bury` does that, once it knows how."""
        worker.process.kill()
        worker.gone = gone or f"worker {worker} was ended"
        calls = list(worker.calls.values())
        worker.calls.clear()
        worker.given_up.clear()
        self._workers.remove(worker)
        task = self.loop.create_task(self._bury(worker, calls if by_itself else None))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        self._dispatch()
        return calls

    async def _bury(self, worker: PoolWorker, lost: list[PoolCall] | None) -> None:
        """Wait until the worker process has ended, and close its pipes. `lost`: if it ended by
        itself, its calls, which raise `WorkerLost` then; else None."""
        how = await worker.process.gone()
        worker.process.close()
        if lost is not None:
            self._lose_ended(worker, lost, how or "it hung up")

    # -- the end ------------------------------------------------------------------------------

    def give_idle(self) -> list[WorkerProcess]:
        """Return the idle workers, for another event loop, and end the others. This pool's loop has
        closed."""
        idle = [w.process for w in self._workers if w.ready and w.is_idle and not w.draining]
        for worker in self._workers:
            if worker.process not in idle:
                worker.process.close()
        self._workers.clear()
        return idle

    async def close(self) -> None:
        """End all workers, wait for their end, and have all calls raise `NoWorker`."""
        for timer in (self._grow_timer, self._idle_timer, self._watch_timer):
            if timer is not None:
                timer.cancel()
        waiting, self._waiting = self._waiting, deque()
        calls = list(waiting)
        for worker in list(self._workers):
            calls += self._retire(worker)
        for call in calls:
            call.settle(NoWorker(f"the {self.kind} was closed"))
        while self._ending:
            await asyncio.wait(self._ending)
