"""The processes of a run's environments, and which episodes live in which process.

    begin -> waits for room -> the process with the fewest episodes -> its reply
    act   -> the episode's own process, or `WorkerLost` if that is gone

All processes that the run may have are started at the beginning; one that is lost is replaced. What
is the same for reward functions is in `workers/pool.py`.

When a process dies, nobody knows which of its calls was to blame. So the prompts of all of them are
suspected, and their next episodes begin in a separate process, those of one prompt at a time: a
prompt that always brings down its process does not take others along again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Any

from rollpacker.workers.kinds import END
from rollpacker.workers.pool import (
    GROW_AFTER_S,
    MAX_FAILED_STARTS,
    PoolCall,
    PoolWorker,
    WorkerLost,
    WorkerPool,
)

MAX_EPISODES = 1000
"""Most episodes that live in one process."""
ANSWER_WITHIN_S = 2.0
"""Seconds after which a process counts as hung that does not react when told to give a call up. All
its episodes are lost with it, so it has longer than a process of a reward function."""
MAX_HUNG = 16
"""Number of calls that must hang in a process (go on after they were given up) for it to get no
more episodes. The process ends once those that it has are over."""
APART_WITHIN_S = 30.0
"""Seconds after which an episode of a suspected prompt begins among the others, if the separate
process for such episodes has not become free."""


class GivenUp(Exception):
    """The call was given up through `give_up`, not by the task that waits for it."""


class EpisodePool(WorkerPool):
    """The pool of processes that episodes live in. A process has many episodes at once, and keeps
    them between calls; in all else see `WorkerPool`."""

    kind = "environment"
    _closed = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make a pool without episodes. The arguments are those of `WorkerPool`."""
        super().__init__(*args, **kwargs)
        self._suspects: set[Hashable] = set()
        self._suspected: deque[PoolCall] = deque()
        """Calls that begin episodes of suspected prompts, whose earlier episodes may have ended
        their process. They wait for the separate process."""
        self._apart: PoolWorker | None = None
        self._inmate: object = None
        """The prompt whose episodes are in the separate process now. None: no episode is there."""

    def start(self) -> None:
        """Start all processes of the pool. They are ready later; calls wait for them."""
        self._grow()

    def begin(self, payload: bytes, limit_s: float, whose: Hashable) -> PoolCall:
        """Make a call that begins an episode, to be answered within `limit_s` seconds in a process.
        Once it is answered, its `worker` is the episode's process. `whose`: the episode's prompt,
        which is suspected if the process dies during a call."""
        call = self._made(payload, limit_s)
        call.whose = whose
        if whose in self._suspects:
            self._suspected.append(call)
            self.loop.call_later(APART_WITHIN_S, self._waits_no_longer, call)
        else:
            self._waiting.append(call)
        self._dispatch()
        return call

    def act(self, payload: bytes, limit_s: float, worker: PoolWorker, whose: Hashable) -> PoolCall:
        """Make a call of an episode that lives in the process `worker`, with `limit_s` seconds for
        an answer. `whose`: the episode's prompt. Raises `WorkerLost` if the process is gone."""
        if worker.gone:
            raise WorkerLost(worker.gone, how="", stopped=False, left_s=limit_s)
        call = self._made(payload, limit_s)
        call.whose = whose
        self._begin(call, worker)
        return call

    async def answer(self, call: PoolCall) -> dict[str, Any]:
        """Wait for a call's reply and return it. Raises the errors of `WorkerPool.call`, and
        `GivenUp`. Cancelling gives the call up."""
        return await self._answer(call)

    def give_up(self, call: PoolCall) -> None:
        """Give up waiting for this call, whose `answer` then raises `GivenUp`. Idempotent."""
        if not call.future.done():
            self._cancel(call)
            call.settle(GivenUp())

    def keep(self, worker: PoolWorker) -> None:
        """Note that one more episode lives in this process: it is busy until `release`."""
        worker.num_kept += 1

    def release(self, worker: PoolWorker, episode: int, whose: Hashable) -> None:
        """Note that the episode of this number is over, and have its process drop it. `whose`: its
        prompt, suspected no longer if the process lives."""
        worker.num_kept -= 1
        if worker in self._workers:
            self._suspects.discard(whose)
        self.forget(worker, episode)

    def forget(self, worker: PoolWorker, episode: int) -> None:
        """Have a process drop the episode with this number, which may still be beginning."""
        if worker in self._workers:
            worker.process.send(END, episode)
            self._freed(worker)

    # -- who is suspected -------------------------------------------------------------------

    def _dispatch(self) -> None:
        super()._dispatch()
        if self._suspected:
            # Soon: who has just heard that an episode has begun there has first to keep it.
            self.loop.call_soon(self._dispatch_suspected)

    def _dispatch_suspected(self) -> None:
        for call in list(self._suspected):
            worker = None if call.future.done() else self._place_apart(call)
            if worker is not None or call.future.done():
                self._suspected.remove(call)
            if worker is not None:
                self._begin(call, worker)
        if self._suspected and self._lacks_apart():
            self._plan_growth()

    def _place_apart(self, call: PoolCall) -> PoolWorker | None:
        if self._lacks_apart():
            idle = (one for one in self._open() if not _load(one))
            self._apart = next(idle, None)
        if self._apart is None:
            return None
        if not _load(self._apart):
            self._inmate = call.whose
        return self._apart if self._inmate == call.whose else None

    def _loaded(self, worker: PoolWorker, hello: dict[str, Any]) -> None:
        super()._loaded(worker, hello)
        if self._suspected and self._lacks_apart() and worker.ready:
            self._apart = worker

    def _lacks_apart(self) -> bool:
        return self._apart is None or self._apart.draining

    def _waits_no_longer(self, call: PoolCall) -> None:
        if call in self._suspected:
            self._suspected.remove(call)
            self._waiting.append(call)
            self._dispatch()

    # -- what is different here -------------------------------------------------------------

    def _place(self, call: PoolCall) -> PoolWorker | None:
        open_to_more = (
            worker
            for worker in self._open()
            if worker is not self._apart and _load(worker) < MAX_EPISODES
        )
        return min(open_to_more, key=_load, default=None)

    def _open(self) -> list[PoolWorker]:
        return [one for one in self._workers if one.ready and not one.draining]

    def _num_to_start(self) -> int:
        """Number of processes to start. The separate process for suspected prompts comes on top of
        the number that the run asked for."""
        others = sum(not one.draining and one is not self._apart for one in self._workers)
        return self._max_workers - others + bool(self._suspected and self._lacks_apart())

    def _plan_growth(self) -> None:
        """Start missing processes soon, unless starting them has failed too often."""
        hopeless = self._num_failed_starts >= MAX_FAILED_STARTS and not self._waiting
        if self._grow_timer is None and self._num_to_start() > 0 and not hopeless:
            self._grow_timer = self.loop.call_later(GROW_AFTER_S, self._grow)

    def _start_failed(self, why: str, *, for_good: bool = False) -> None:
        super()._start_failed(why, for_good=for_good)
        if for_good:
            self._num_failed_starts = MAX_FAILED_STARTS

    def _lose_ended(self, worker: PoolWorker, calls: list[PoolCall], how: str) -> None:
        if not worker.process.child.went_with_host():
            self._suspects.update(call.whose for call in calls)
        super()._lose_ended(worker, calls, how)

    def _retire(
        self, worker: PoolWorker, gone: str = "", *, by_itself: bool = False
    ) -> list[PoolCall]:
        if worker is self._apart:
            self._apart = None
        calls = super()._retire(worker, gone, by_itself=by_itself)
        if not self._closed:
            self._plan_growth()
        return calls

    def _retire_idle(self) -> None:
        self._idle_timer = None

    def _answer_within_s(self) -> float:
        return ANSWER_WITHIN_S

    def _must_have_ended(self, worker: PoolWorker, number: int) -> None:
        if number not in worker.given_up or worker not in self._workers:
            return
        worker.given_up.discard(number)
        worker.num_hung += 1
        if worker.num_hung >= MAX_HUNG:
            worker.draining = True
            self._plan_growth()
            self._end_oldest_draining()
        self._freed(worker)

    def _end_oldest_draining(self) -> None:
        """End the oldest process that gets no more episodes, if there are more such processes than
        the run may have processes at all."""
        draining = [worker for worker in self._workers if worker.draining]
        if len(draining) > self._max_workers:
            oldest = draining[0]
            how = f"worker {oldest} was ended: {oldest.num_hung} calls in it hung"
            for call in self._retire(oldest, how):
                call.lost(how, self.loop.time())

    def give_up_waiting(self, why: str) -> None:
        """Have all calls that wait for a process raise `NoWorker`, which tells `why`."""
        self._waiting.extend(self._suspected)
        self._suspected.clear()
        super().give_up_waiting(why)

    async def close(self) -> None:
        """End all processes, wait for their end, and have all calls raise `NoWorker`."""
        self._closed = True
        self._waiting.extend(self._suspected)
        self._suspected.clear()
        await super().close()


def _load(worker: PoolWorker) -> int:
    return worker.num_kept + worker.num_calls
