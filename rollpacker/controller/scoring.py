"""The checks that are under way: `Score` and `CancelScore` in, `SampleScored` out.

A check of a kind with its own workers or deadline is a task of its own: the core bounds how many
there are. Checks without any bound are handed over in batches, a few at the same time; what is
asked for meanwhile joins the next batch.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from rollpacker.core.commands import Score
from rollpacker.core.events import SampleScored
from rollpacker.core.ids import SampleId
from rollpacker.core.reward_schedule import RewardScheduleConfig
from rollpacker.rewards.base import Failed, Reward, RewardInput, Scored

MAX_BATCHES = 8
"""Batches under way at once."""

Verdict = Scored | Failed
Answer = Callable[[SampleScored, Verdict | None], None]
"""Told of every verdict; of a cancelled check without one."""


class Scoring:
    """Belongs to the event loop, but for `ask`, which any thread may call under the controller's
    lock."""

    def __init__(
        self,
        reward: Reward,
        config: RewardScheduleConfig,
        lock: threading.RLock,
        *,
        read: Callable[[SampleId], RewardInput],
        answer: Answer,
        ended: Callable[[BaseException | None], None],
    ) -> None:
        """`read` makes what the reward sees; `answer` takes verdicts; `ended` is told when a task
        is done, with what it died of, if it did. `lock` guards what waits."""
        self._reward = reward
        self._lock = lock
        self._alone = frozenset(
            source
            for source, kind in config.kinds.items()
            if kind.workers is not None or kind.deadline is not None
        )
        self._read, self._answer, self._ended = read, answer, ended
        self._single: deque[Score] = deque()
        self._batched: deque[Score] = deque()
        self._tasks: dict[asyncio.Task[None], tuple[list[Score], set[SampleId]]] = {}
        """Under way: what was asked for, and the samples whose verdicts are still needed."""
        self._num_batches = 0
        self._closed = False

    def ask(self, command: Score) -> None:
        """Remember; `start` hands over."""
        alone = command.sample.prompt.source in self._alone
        (self._single if alone else self._batched).append(command)

    @property
    def waits(self) -> bool:
        """Something is to be handed over."""
        return bool(self._single or self._batched)

    def waiting(self) -> list[SampleId]:
        """Asked for, and not handed over yet."""
        return [command.sample for command in (*self._single, *self._batched)]

    def start(self) -> None:
        """Hand over what was asked for."""
        with self._lock:
            batches = [[command] for command in self._single]
            self._single.clear()
            if self._batched and self._num_batches < MAX_BATCHES:
                batches.append(list(self._batched))
                self._batched.clear()
                self._num_batches += 1
        for commands in batches:
            self._start(commands)

    def cancel(self, samples: Sequence[SampleId]) -> None:
        """These verdicts are not needed any more. Work that serves nobody else is ended."""
        unneeded = set(samples)
        with self._lock:
            for queue in (self._single, self._batched):
                for command in [c for c in queue if c.sample in unneeded]:
                    queue.remove(command)
                    unneeded.discard(command.sample)
                    self._answer(_cancelled(command.sample), None)
        for task, (_, needed) in list(self._tasks.items()):
            if needed & unneeded:
                needed -= unneeded
                if not needed:
                    task.cancel()

    def close(self) -> None:
        """End what runs; nobody is told any more."""
        self._closed = True
        for task in self._tasks:
            task.cancel()

    def _start(self, commands: list[Score]) -> None:
        task = asyncio.ensure_future(self._score(commands))
        self._tasks[task] = (commands, {command.sample for command in commands})
        task.add_done_callback(self._done)

    async def _score(self, commands: list[Score]) -> None:
        began = time.perf_counter()
        inputs = [self._read(command.sample) for command in commands]
        verdicts = await self._reward.score(inputs, timeout_s=commands[0].timeout_s)
        seconds = time.perf_counter() - began
        for command, verdict in zip(commands, verdicts, strict=True):
            self._answer(_event(command.sample, verdict, seconds), verdict)

    def _done(self, task: asyncio.Task[None]) -> None:
        commands, _ = self._tasks.pop(task)
        if commands[0].sample.prompt.source not in self._alone:
            self._num_batches -= 1
        if self._closed:
            return
        if task.cancelled():
            for command in commands:
                self._answer(_cancelled(command.sample), None)
        self._ended(None if task.cancelled() else task.exception())
        self.start()


def _event(sample: SampleId, verdict: Verdict, measured_s: float) -> SampleScored:
    seconds = round(measured_s if verdict.seconds is None else verdict.seconds, 6)
    if isinstance(verdict, Failed):
        return SampleScored(
            time_s=0.0,
            sample=sample,
            value=None,
            parts=verdict.parts,
            reason=verdict.reason,
            seconds=seconds,
            cause=str(verdict.cause),
        )
    return SampleScored(
        time_s=0.0,
        sample=sample,
        value=verdict.value,
        parts=verdict.parts,
        seconds=seconds,
        correct=verdict.correct,
        timed_out=verdict.timed_out,
    )


def _cancelled(sample: SampleId) -> SampleScored:
    return SampleScored(
        time_s=0.0, sample=sample, value=None, reason="not needed any more", cause="cancelled"
    )
