"""The rewards' port: carries out `Score` and `CancelScore`, and answers with `SampleScored`.

A check is the rewards' judgement of one sample. Checks of tasks with their own workers or deadline
run singly, and the core bounds their number. All others are passed to the rewards in batches, a few
at a time; those that come meanwhile join the next batch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, field, replace

from rollpacker.bus import Routes
from rollpacker.core.commands import CancelScore, Score
from rollpacker.core.events import SampleScored
from rollpacker.core.ids import SampleId
from rollpacker.data.dataset import PromptRow
from rollpacker.environments.environment import Episode, Lost
from rollpacker.rewards.reward import Cause, Failed, Progress, Reward, RewardInput, Scored
from rollpacker.run.errors import Decode
from rollpacker.run.ports.evaluation import reward_input
from rollpacker.run.ports.shared import Shared

MAX_BATCHES = 8
"""Number of batches of reward checks that may run at once."""

Verdict = Scored | Failed


@dataclass(eq=False, slots=True)
class Scoring:
    """The rewards' port. Used on the event loop, except for commands, which come in any thread
    under the bus's lock."""

    shared: Shared
    _: KW_ONLY
    reward: Reward
    rows: Sequence[PromptRow]
    decode: Decode
    num_steps: int
    """Number of steps of the whole run; rewards are told of it."""
    _single: deque[Score] = field(default_factory=deque, init=False)
    _batched: deque[Score] = field(default_factory=deque, init=False)
    _tasks: dict[asyncio.Task[None], tuple[list[Score], set[SampleId], bool]] = field(
        default_factory=dict, init=False
    )
    """Running reward checks by asyncio task: the core's commands that it carries out, the samples
    whose verdicts are still wanted, and whether it is a batch."""
    _num_batches: int = field(default=0, init=False)
    _closed: bool = field(default=False, init=False)

    def routes(self) -> Routes:
        return {
            Score: self._ask,  # handed over when the engine's call ends
            CancelScore: lambda command: self.shared.main.post(self._cancel, command.samples),
        }

    @property
    def waits(self) -> bool:
        """Whether any reward checks are queued that have not been started."""
        return bool(self._single or self._batched)

    def waiting(self) -> list[SampleId]:
        """Returns the samples whose reward checks are queued and have not been started."""
        return [command.sample for command in (*self._single, *self._batched)]

    def start(self) -> None:
        """Start the queued reward checks. Used on the event loop only."""
        with self.shared.bus.lock:
            single = [[command] for command in self._single]
            self._single.clear()
            batch: list[Score] = []
            if self._batched and self._num_batches < MAX_BATCHES:
                batch = list(self._batched)
                self._batched.clear()
                self._num_batches += 1
        for commands in single:
            self._start(commands)
        if batch:
            self._start(batch, is_batch=True)

    def close(self) -> None:
        """Cancel all running reward checks, and report no verdict any more."""
        self._closed = True
        for task in self._tasks:
            task.cancel()

    def _ask(self, command: Score) -> None:
        (self._single if self._is_alone(command) else self._batched).append(command)

    def _is_alone(self, command: Score) -> bool:
        """Whether this sample is judged in a call of its own, and not with others in a batch."""
        known = self.shared.desk.get(command.sample)
        if known is not None and known.finish is not None:
            return True  # nobody else waits for its environment
        kind = self.shared.bus.job.config.rewards.kinds.get(command.sample.prompt.source)
        return kind is not None and (kind.workers is not None or kind.deadline is not None)

    def _cancel(self, samples: Sequence[SampleId]) -> None:
        """Note that these samples' verdicts are not wanted any more. A reward check that serves no
        other sample is cancelled."""
        unneeded = set(samples)
        with self.shared.bus.lock:
            for queue in (self._single, self._batched):
                for command in [c for c in queue if c.sample in unneeded]:
                    queue.remove(command)
                    unneeded.discard(command.sample)
                    self._answer(_cancelled(command.sample), None)
        for task, (_, needed, _) in list(self._tasks.items()):
            if needed & unneeded:
                needed -= unneeded
                if not needed:
                    task.cancel()

    def _start(self, commands: list[Score], *, is_batch: bool = False) -> None:
        # Read before anything else can happen: a step's commit forgets what is not waiting.
        inputs = [self._read(command.sample) for command in commands]
        finish = self.shared.desk[commands[0].sample].finish
        task = asyncio.ensure_future(
            self._score(commands, inputs)
            if finish is None
            else self._score_finished(commands, inputs[0], finish)
        )
        self._tasks[task] = (commands, {command.sample for command in commands}, is_batch)
        task.add_done_callback(self._done)

    def _read(self, sample: SampleId) -> RewardInput:
        known = self.shared.desk[sample]
        progress = Progress(self.shared.bus.job.step, self.num_steps)
        judged = reward_input(
            self.rows[sample.prompt.row], known.response, self.decode, progress, known.episode
        )
        known.completion = judged.completion
        if known.episode is not None:
            known.completion = self.decode(known.response.tokens)
        return judged

    async def _score_finished(
        self, commands: list[Score], judged: RewardInput, finish: Future[Episode | Lost]
    ) -> None:
        """Judge one sample after its environment has given the final reward. If the environment
        fails, the sample has no verdict."""
        episode = await asyncio.wrap_future(finish)
        if isinstance(episode, Lost):
            cause = Cause.DEADLINE if episode.cause == "deadline" else Cause.SAMPLE
            lost = Failed(reason=f"its environment: {episode.reason}", cause=cause)
            self._answer(_event(commands[0].sample, lost, episode.seconds), lost)
            return
        known = self.shared.desk.get(commands[0].sample)
        if known is not None:
            known.episode = episode
        await self._score(commands, [replace(judged, episode=episode)])

    async def _score(self, commands: list[Score], inputs: list[RewardInput]) -> None:
        began = self.shared.bus.clock.now()
        verdicts = await self.reward.score(inputs, timeout_s=commands[0].timeout_s)
        seconds = self.shared.bus.clock.now() - began
        self.shared.watch.check_rewards()
        for command, verdict in zip(commands, verdicts, strict=True):
            self._answer(_event(command.sample, verdict, seconds), verdict)

    def _answer(self, event: SampleScored, verdict: Verdict | None) -> None:
        """Put the verdict on the desk (None: the check was cancelled), and tell the core."""
        known = self.shared.desk.get(event.sample)
        if known is not None:
            if isinstance(verdict, Scored):
                known.verdict = verdict
            if event.seconds is not None:
                known.check_s = event.seconds
        self.shared.bus.take(event)

    def _done(self, task: asyncio.Task[None]) -> None:
        commands, _, is_batch = self._tasks.pop(task)
        self._num_batches -= is_batch
        # Asked for in any case: asyncio prints what nobody has looked at.
        error = None if task.cancelled() else task.exception()
        if self._closed:
            return
        if task.cancelled():
            for command in commands:
                self._answer(_cancelled(command.sample), None)
        self.shared.watch.sign()
        if error is not None:
            self.shared.main.fail(error)
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
