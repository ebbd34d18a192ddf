"""What happened when, step by step: the fold behind the timeline picture and the trace."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from rollpacker.core.commands import (
    Commit,
    Defer,
    Launch,
    RoundKind,
    StartGradients,
    SyncWeights,
    TrainOn,
)
from rollpacker.core.events import (
    Committed,
    SampleAborted,
    SampleFailed,
    SampleGenerated,
    SampleScored,
    Trained,
    WeightsSynced,
)
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.records import Entry, Note, Record, Session


class Outcome(StrEnum):
    """What became of a sample."""

    TRAINED = "trained on"
    SURPLUS = "surplus, stopped"
    DEFERRED = "prompt deferred"
    UNUSED = "finished, not used"
    FAILED = "failed"


@dataclass(slots=True)
class SampleSpan:
    sample: SampleId
    start_s: float
    end_s: float | None = None
    tokens: int = 0
    outcome: Outcome = Outcome.UNUSED
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of the step besides rollout: reward_wait, training, sync, checkpoint, evaluation,
    startup."""

    name: str
    start_s: float
    end_s: float


@dataclass(slots=True)
class StepSpans:
    """One committed step. Times are seconds since the run began."""

    step: int = 0
    kind: RoundKind | None = None
    start_s: float = 0.0
    end_s: float = 0.0
    rollout_start_s: float | None = None
    rollout_end_s: float | None = None
    samples: dict[SampleId, SampleSpan] = field(default_factory=dict)
    phases: list[Phase] = field(default_factory=list)


class SpanFold:
    """Feed it a log's entries; it answers with a `StepSpans` whenever a step is committed."""

    def __init__(self) -> None:
        self._step = StepSpans()
        self._last_step = 0
        self._num_live = 0
        self._num_streaming = 0
        """Groups whose gradients are being accumulated while the round goes on."""
        self._open: tuple[str, float] | None = None
        self._committing = False
        self._trained: set[SampleId] = set()
        self._deferred: set[PromptId] = set()

    def feed(self, entry: Entry) -> StepSpans | None:
        if isinstance(entry, Session):
            if not self._committing:
                self._reset(entry.time_s)
            return None
        if isinstance(entry, Note) and entry.name == "gradients":
            self._num_streaming = max(0, self._num_streaming - int(entry.metrics.get("groups", 0)))
            if not self._num_streaming and self._open and not self._trained:
                self._turn("reward_wait", entry.time_s)
            return None
        if isinstance(entry, Note):
            start = entry.time_s - entry.seconds
            self._step.phases.append(Phase(entry.name, start, entry.time_s))
            return None
        done = self._take(entry)
        for command in entry.commands:
            self._obey(command, entry.time_s)
        return done

    def _reset(self, time_s: float) -> None:
        self._step = StepSpans(start_s=time_s)
        self._num_live = 0
        self._num_streaming = 0
        self._open = None
        self._committing = False
        self._trained, self._deferred = set(), set()

    def _take(self, record: Record) -> StepSpans | None:
        event = record.event
        match event:
            case SampleGenerated() | SampleAborted():
                self._end_sample(event.sample, event.time_s, event.num_tokens)
                if isinstance(event, SampleAborted) and event.sample in self._step.samples:
                    self._step.samples[event.sample].outcome = Outcome.SURPLUS
            case SampleFailed():
                self._end_sample(event.sample, event.time_s, 0)
                if event.sample in self._step.samples:
                    self._step.samples[event.sample].outcome = Outcome.FAILED
            case SampleScored():
                if event.sample in self._step.samples:
                    self._step.samples[event.sample].reward = event.value
            case Trained() | WeightsSynced():
                self._turn(None, event.time_s)
            case Committed():
                self._turn(None, event.time_s)
                return self._commit(event)
            case _:
                pass
        return None

    def _end_sample(self, sample: SampleId, time_s: float, num_tokens: int) -> None:
        span = self._step.samples.get(sample)
        if span is None or span.end_s is not None:
            return
        span.end_s, span.tokens = time_s, num_tokens
        self._num_live -= 1
        if self._num_live == 0 and self._open is None:
            self._step.rollout_end_s = time_s
            self._open = ("training" if self._num_streaming else "reward_wait", time_s)

    def _obey(self, command: object, time_s: float) -> None:
        step = self._step
        match command:
            case Launch():
                self._turn(None, time_s)
                step.kind = step.kind or command.kind
                if step.rollout_start_s is None:
                    step.rollout_start_s = time_s
                for sample in command.samples:
                    step.samples[sample] = SampleSpan(sample, time_s)
                self._num_live += len(command.samples)
            case Defer():
                self._deferred.update(command.prompts)
            case StartGradients():
                self._num_streaming += len(command.groups)
                if self._open is not None and self._open[0] == "reward_wait":
                    self._turn("training", time_s)
            case TrainOn():
                self._num_streaming = 0
                self._trained = {sample for group in command.groups for sample in group}
                self._turn("training", time_s)
            case SyncWeights():
                self._turn("sync", time_s)
            case Commit():
                self._committing = True
                self._turn("checkpoint", time_s)
            case _:
                pass

    def _turn(self, name: str | None, time_s: float) -> None:
        """End the phase at hand and begin another."""
        if self._open is not None and time_s > self._open[1]:
            self._step.phases.append(Phase(self._open[0], self._open[1], time_s))
        self._open = None if name is None else (name, time_s)

    def _commit(self, event: Committed) -> StepSpans | None:
        if event.step <= self._last_step:
            self._committing = False
            return None
        step = self._step
        step.step, step.end_s, self._last_step = event.step, event.time_s, event.step
        for span in step.samples.values():
            if span.sample in self._trained:
                span.outcome = Outcome.TRAINED
            elif span.sample.prompt in self._deferred and span.outcome is not Outcome.FAILED:
                span.outcome = Outcome.DEFERRED
        self._reset(event.time_s)
        return step


def iterate_steps(entries: Iterable[Entry]) -> Iterator[StepSpans]:
    """The committed steps of a log, one at a time."""
    fold = SpanFold()
    for entry in entries:
        done = fold.feed(entry)
        if done is not None:
            yield done


def read_steps(
    entries: Iterable[Entry], *, steps: range | None = None, last: int | None = None
) -> list[StepSpans]:
    """Those of the committed steps that are in `steps` (None: any), at most the `last` ones."""
    kept: deque[StepSpans] = deque(maxlen=last)
    for done in iterate_steps(entries):
        if steps is None or done.step in steps:
            kept.append(done)
        if steps is not None and (not steps or done.step >= steps[-1]):
            break
    return list(kept)


class Excerpt:
    """A few steps that show the rhythm: `count` in a row that end with a long round, or else the
    first ones. Feed it every step."""

    def __init__(self, count: int) -> None:
        self.steps: list[StepSpans] = []
        self._count = count
        self._recent: deque[StepSpans] = deque(maxlen=count)
        self._settled = False

    def feed(self, step: StepSpans) -> None:
        if self._settled:
            return
        self._recent.append(step)
        if len(self.steps) < self._count:
            self.steps.append(step)
        if step.kind is RoundKind.LONG and len(self._recent) == self._count:
            self.steps = list(self._recent)
            self._settled = True
