"""The processes of a run's environments, and which episodes live in which.

    begin -> waits for room -> the process with the fewest episodes -> its reply
    act   -> the episode's own process, or `WorkerLost` if that is gone

There are as many processes as the run may have, from the start; one that is lost is replaced. What
is the same for reward functions is `workers/pool.py`.

Which of the calls in a process brought it down, nobody knows. So all whose they were are suspected,
and begin their next episodes in a process apart, one prompt's at a time: a prompt that always
brings down its process takes no other along again.
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
"""Most episodes in one process."""
ANSWER_WITHIN_S = 2.0
"""A process that does not react for so long hangs. All its episodes are lost with it, so it has
longer than one of a reward function."""
MAX_HUNG = 16
"""A process in which so many calls were given up and went on all the same takes no more
episodes, and ends with those that it has."""
APART_WITHIN_S = 30.0
"""Seconds after which an episode that is suspected begins among the others, if the process apart
has not become free."""


class GivenUp(Exception):
    """The call was given up by somebody else than who waits for it."""


class EpisodePool(WorkerPool):
    """See `WorkerPool`."""

    kind = "environment"
    _closed = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See `WorkerPool`."""
        super().__init__(*args, **kwargs)
        self._suspects: set[Hashable] = set()
        self._suspected: deque[PoolCall] = deque()
        """Calls that wait for the process apart."""
        self._apart: PoolWorker | None = None
        self._inmate: object = None
        """The prompt whose episodes are in the process apart."""

    def start(self) -> None:
        """Start as many processes as there may be."""
        self._grow()

    def begin(self, payload: bytes, limit_s: float, whose: Hashable) -> PoolCall:
        """Make a call that begins an episode. Once it was answered, `worker` is the episode's.
        Episodes of the same `whose` are suspected together."""
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
        """Make a call in the process of an episode. Raises `WorkerLost` if that is gone."""
        if worker.gone:
            raise WorkerLost(worker.gone, how="", stopped=False, left_s=limit_s)
        call = self._made(payload, limit_s)
        call.whose = whose
        self._begin(call, worker)
        return call

    async def answer(self, call: PoolCall) -> dict[str, Any]:
        """Return the reply. Raises as `WorkerPool.call` does, and `GivenUp`. Cancelling gives the
        call up."""
        return await self._answer(call)

    def give_up(self, call: PoolCall) -> None:
        """Stop waiting for this call. Idempotent."""
        if not call.future.done():
            self._cancel(call)
            call.settle(GivenUp())

    def keep(self, worker: PoolWorker) -> None:
        """An episode lives there from now on."""
        worker.num_kept += 1

    def release(self, worker: PoolWorker, episode: int, whose: Hashable) -> None:
        """An episode that lived there is over."""
        worker.num_kept -= 1
        if worker in self._workers:
            self._suspects.discard(whose)
        self.forget(worker, episode)

    def forget(self, worker: PoolWorker, episode: int) -> None:
        """Have a process drop what it has of an episode, which may have been about to begin."""
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
        """The process apart is one more than the run asked for."""
        others = sum(not one.draining and one is not self._apart for one in self._workers)
        return self._max_workers - others + bool(self._suspected and self._lacks_apart())

    def _plan_growth(self) -> None:
        """Start missing processes soon. A process that never gets ready is not tried for ever."""
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
        """End the oldest process that takes no more episodes, if there are more of these than the
        run may have processes."""
        draining = [worker for worker in self._workers if worker.draining]
        if len(draining) > self._max_workers:
            oldest = draining[0]
            how = f"worker {oldest} was ended: {oldest.num_hung} calls in it hung"
            for call in self._retire(oldest, how):
                call.lost(how, self.loop.time())

    def give_up_waiting(self, why: str) -> None:
        """See `WorkerPool`."""
        self._waiting.extend(self._suspected)
        self._suspected.clear()
        super().give_up_waiting(why)

    async def close(self) -> None:
        """See `WorkerPool`."""
        self._closed = True
        self._waiting.extend(self._suspected)
        self._suspected.clear()
        await super().close()


def _load(worker: PoolWorker) -> int:
    return worker.num_kept + worker.num_calls
