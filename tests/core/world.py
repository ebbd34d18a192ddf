"""A world in virtual time for the core: an engine that knows every length, a reward, a cursor.

It obeys commands to the letter and is as unkind as it is told to be: engine failures, missing
verdicts, slow verdicts, responses that finish in the same instant in which they are aborted.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from rollpacker.core.commands import (
    Abort,
    CancelScore,
    Command,
    Commit,
    Defer,
    Drop,
    FetchPrompts,
    Finish,
    Launch,
    Release,
    Score,
    StartGradients,
    SyncWeights,
    TrainOn,
)
from rollpacker.core.events import (
    Committed,
    Event,
    PromptsFetched,
    RunStarted,
    SampleAborted,
    SampleFailed,
    SampleGenerated,
    SampleScored,
    StopRequested,
    Trained,
    WeightsSynced,
)
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.job import Job
from rollpacker.core.job_config import JobConfig
from rollpacker.core.records import Record


@dataclass
class World:
    config: JobConfig
    num_rows: int = 10
    epochs: int = 1
    seed: int = 0
    length: Callable[[SampleId, random.Random], int] = lambda sample, rng: rng.randint(1, 20)
    failure_rate: float = 0.0
    no_verdict_rate: float = 0.0
    infrastructure_rate: float = 0.0
    """Share of checks whose machinery fails."""
    verdict_delay: float = 0.0
    late_finish_rate: float = 0.0
    """Share of aborts that cross a finish on its way."""
    sources: tuple[str, ...] = ("train",)
    """Prompts take turns among them."""
    stop_at_step: int | None = None
    stop_at_round: int | None = None
    """A stop is asked for while this round is under way."""
    log: list[Record] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.job = Job(self.config)
        self.now = 0.0
        self.cursor = (0, 0)
        self.heap: list[tuple[float, int, Event]] = []
        self.counter = 0
        self.running: dict[SampleId, float] = {}
        self.checking: set[SampleId] = set()
        self.retried: set[SampleId] = set()
        self.version = 0
        self.finished: str | None = None
        self.longest_queue = 0
        self.streamed: list[tuple[SampleId, ...]] = []
        """Groups whose gradients were begun, of this step."""
        self.snapshots: dict[int, tuple[dict, tuple[int, int], int]] = {}

    def rng(self, *key: object) -> random.Random:
        return random.Random(repr((self.seed, *map(str, key))))

    def push(self, delay: float, event: Event) -> None:
        self.counter += 1
        heapq.heappush(self.heap, (self.now + delay, self.counter, event))

    def run(self, max_events: int = 100_000) -> World:
        self.push(0.0, RunStarted(time_s=0.0))
        return self.go_on(max_events)

    def resume_from(self, step: int, config: JobConfig | None = None) -> World:
        """A new process that knows nothing but the checkpoint of `step`, and its configuration."""
        state, cursor, version = self.snapshots[step]
        settings = {name: getattr(self, name) for name in _SETTINGS}
        world = World(**settings | {"config": config or self.config})
        world.job = Job.restore(world.config, state)
        world.cursor, world.version = cursor, version
        world.push(0.0, Committed(time_s=0.0, step=step, checkpointed=True))
        return world.go_on()

    def go_on(self, max_events: int = 100_000) -> World:
        while self.heap:
            max_events -= 1
            assert max_events, f"no end: waiting for {self.job.waiting_for()}"
            self.now, _, event = heapq.heappop(self.heap)
            event = replace(event, time_s=self.now)
            if isinstance(event, SampleGenerated | SampleFailed):
                if event.sample not in self.running:
                    continue
                del self.running[event.sample]
            if isinstance(event, SampleScored):
                if event.sample not in self.checking:
                    continue  # cancelled
                self.checking.remove(event.sample)
            commands = self.job.handle(event)
            self.longest_queue = max(self.longest_queue, self.job.num_queued)
            self.log.append(
                Record(time_s=self.now, event=event, commands=tuple(commands), cost_s=0.0)
            )
            for command in commands:
                self.obey(command)
        assert self.finished, f"stuck: waiting for {self.job.waiting_for()}"
        return self

    def obey(self, command: Command) -> None:
        match command:
            case FetchPrompts(count=count):
                self.fetch(count)
            case Launch(samples=samples):
                assert command.version == self.version
                for sample in samples:
                    self.launch(sample)
                if command.round == self.stop_at_round:
                    self.push(0.0, StopRequested(time_s=0.0))
            case Abort(samples=samples):
                for sample in samples:
                    self.abort(sample)
            case CancelScore(samples=samples):
                for sample in samples:
                    self.push(
                        0.0, SampleScored(time_s=0.0, sample=sample, value=None, cause="cancelled")
                    )
            case Score(sample=sample, timeout_s=timeout_s, retry=retry):
                assert sample not in self.checking, "checked twice at the same time"
                self.checking.add(sample)
                rng = self.rng("verdict", sample)
                value = None if rng.random() < self.no_verdict_rate else float(rng.random() < 0.5)
                seconds = rng.random() * self.verdict_delay
                if self.rng("machinery", sample, retry).random() < self.infrastructure_rate:
                    self.push(
                        seconds,
                        SampleScored(time_s=0.0, sample=sample, value=None, cause="infrastructure"),
                    )
                    return
                if retry:
                    self.retried.add(sample)
                if timeout_s is not None and seconds > timeout_s:
                    seconds, value = timeout_s, 0.0
                self.push(
                    seconds, SampleScored(time_s=0.0, sample=sample, value=value, seconds=seconds)
                )
            case StartGradients(step=step, groups=groups):
                assert step == self.job.step + 1
                apart = self.job.config.trainer_apart
                assert apart or not self.running, "one device: gradients once the engine is empty"
                self.streamed += groups
            case TrainOn(step=step, groups=groups, weights=weights):
                assert command.num_streamed == sum(map(len, self.streamed))
                if self.job.config.stream.enabled:
                    assert bool(command.num_streamed) != bool(command.not_streamed), command
                else:
                    assert not command.not_streamed
                assert not self.running, "trained while the engine was at work"
                assert len(set(self.streamed)) == len(self.streamed), "begun twice"
                assert set(self.streamed) <= set(groups), "begun, but not trained on"
                self.streamed = []
                if weights is not None:
                    assert [len(w) for w in weights] == [len(g) for g in groups]
                    assert all(w > 0 for group in weights for w in group)
                self.push(1.0, Trained(time_s=0.0, step=step, version=self.version + 1))
            case SyncWeights(version=version):
                self.version = version
                self.push(0.1, WeightsSynced(time_s=0.0, version=version))
            case Commit(step=step):
                self.snapshots[step] = (self.job.state(), self.cursor, self.version)
                if step == self.stop_at_step:
                    self.push(0.0, StopRequested(time_s=0.0))
                self.push(
                    0.0,
                    Committed(time_s=0.0, step=step, checkpointed=command.last or command.stopping),
                )
            case Finish(reason=reason):
                self.finished = reason
            case Release():
                raise AssertionError("there is one device")
            case Defer() | Drop():
                pass

    def fetch(self, count: int) -> None:
        epoch, position = self.cursor
        rows = range(position, min(position + count, self.num_rows))
        ended = rows.stop == self.num_rows
        self.cursor = (epoch + 1, 0) if ended else (epoch, rows.stop)
        self.push(
            0.0,
            PromptsFetched(
                time_s=0.0,
                prompts=tuple(
                    PromptId(self.sources[row % len(self.sources)], epoch, row) for row in rows
                ),
                epoch_ended=ended,
                data_ended=ended and epoch + 1 == self.epochs,
            ),
        )

    def launch(self, sample: SampleId) -> None:
        assert sample not in self.running, "launched twice"
        rng = self.rng("length", sample)
        length = self.length(sample, rng)
        self.running[sample] = self.now
        if rng.random() < self.failure_rate:
            event: Event = SampleFailed(time_s=0.0, sample=sample, reason="made to")
        else:
            event = SampleGenerated(
                time_s=0.0,
                sample=sample,
                num_tokens=length,
                finish_reason="stop",
                version=self.version,
            )
        self.push(float(length), event)

    def abort(self, sample: SampleId) -> None:
        started = self.running[sample]
        if self.rng("late", sample).random() < self.late_finish_rate:
            late = SampleGenerated(
                time_s=0.0,
                sample=sample,
                num_tokens=1 + int(self.now - started),
                finish_reason="stop",
                version=self.version,
            )
            self.push(0.0, late)
            return
        del self.running[sample]
        self.push(0.0, SampleAborted(time_s=0.0, sample=sample, num_tokens=int(self.now - started)))


_SETTINGS = (
    "config",
    "num_rows",
    "epochs",
    "seed",
    "length",
    "failure_rate",
    "no_verdict_rate",
    "infrastructure_rate",
    "verdict_delay",
    "late_finish_rate",
    "sources",
)


def events_of(world: World, kind: type) -> list:
    return [record.event for record in world.log if isinstance(record.event, kind)]


def commands_of(world: World, kind: type) -> list:
    return [c for record in world.log for c in record.commands if isinstance(c, kind)]
