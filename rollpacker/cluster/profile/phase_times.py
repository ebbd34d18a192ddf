"""Measures from a run's log how long each phase of its iterations took, as a cluster describes jobs
(`cluster/decide/job.py`); also for a run that had its pools to itself.

The rollout lasts from a step's begin to the end of its last sample, training from the command
`TrainOn` to the event `WeightsSynced`. The time between these is `between_s`, the time from then to
the commit `after_s`. Generation of an evaluation counts as rollout. Waits for pools, and switches
between jobs, belong to no phase. The state is small enough for a run to feed its log's entries
live.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rollpacker.cluster.decide.job import EMPTY, EVALUATED, Iteration
from rollpacker.core.commands import (
    Command,
    Commit,
    Enter,
    Launch,
    Leave,
    Replace,
    Resize,
    RoundKind,
    TrainOn,
)
from rollpacker.core.events import (
    Committed,
    Entered,
    Event,
    RunStarted,
    SampleAborted,
    SampleFailed,
    SampleGenerated,
    WeightsSynced,
)
from rollpacker.core.records import (
    CALLBACK_SECONDS,
    EVALUATION_ROLLOUT,
    POOL_SWITCH,
    Entry,
    Note,
    Record,
)


class PhaseTimes:
    """Measures the phases of a run's steps. `feed` takes the log's entries one by one, live or from
    a file, in O(1), and returns an `Iteration` at the commit of each step that one session (life of
    the run's process) did from begin to end. An interrupted step is left out: its time is
    unknown."""

    def __init__(self) -> None:
        self.waited_s = 0.0
        """Seconds of waits for pools and of switches between jobs, in all steps so far."""
        self._now_s = 0.0
        """Time of the current log entry in seconds, less all waits for pools and switches between
        jobs since the process started."""
        self._last_s = 0.0
        """Time of the current log entry in seconds, as the log has it."""
        self._waits = False
        self._step: _Step | None = None
        """The current step. None if an earlier session of the run began it: its time is unknown."""
        self._last_step = 0
        self._incarnation = Counter[int]()
        """Latest incarnation (start's number) of each engine; log entries of others are ignored."""

    def feed(self, entry: Entry) -> Iteration | None:
        if isinstance(entry, Record):
            self._advance(entry.time_s)
            done = self._event(entry.event)
            for command in entry.commands:
                self._command(command)
            return done
        if isinstance(entry, Note):
            self._note(entry)
            return None
        self._last_s, self._waits, self._step = entry.time_s, False, None
        self._last_step = max(self._last_step, entry.step)
        self._incarnation.clear()
        return None

    def _advance(self, time_s: float, switch_s: float = 0.0) -> None:
        passed_s = max(0.0, time_s - self._last_s)
        self._last_s = max(self._last_s, time_s)
        waited_s = passed_s if self._waits else min(switch_s, passed_s)
        self.waited_s += waited_s
        self._now_s += passed_s - waited_s

    def _note(self, note: Note) -> None:
        step = self._step
        holds_up = note.name == POOL_SWITCH and (step is None or step.waits_for_parking)
        self._advance(note.time_s, note.seconds if holds_up else 0.0)
        if note.name == "evaluation" and step is not None:
            step.evaluate(note)
        if note.name == "gradients" and step is not None:
            now, due_s = self._now_s, step.train_on_s
            until_s = now if due_s is None else min(now, due_s)
            step.begun_s += max(0.0, until_s - (now - note.seconds))

    def _event(self, event: Event) -> Iteration | None:
        step, now = self._step, self._now_s
        match event:
            case RunStarted():
                self._step = _Step(now)
            case Committed():
                return self._commit(event)
            case Entered():
                self._waits = False
            case SampleGenerated() | SampleAborted() | SampleFailed() if step is not None:
                if event.incarnation >= self._incarnation[event.engine]:
                    step.ended_s = now
            case WeightsSynced() if step is not None:
                step.synced_s = now
            case _:
                pass
        return None

    def _commit(self, event: Committed) -> Iteration | None:
        done, self._step = self._step, _Step(self._now_s)
        if event.step <= self._last_step:  # a resumed run is given its last one again
            return None
        self._last_step = event.step
        return None if done is None else done.times(event.step, self._now_s)

    def _command(self, command: Command) -> None:
        match command:
            case Enter():
                self._waits = True
            case Leave():  # also of a pool that was still awaited
                self._waits = False
                if self._step is not None:
                    self._step.is_judging = command.pool == "rollout"
            case Replace():
                self._incarnation[command.engine] = command.incarnation
            case Resize():
                for engine, number in enumerate(command.incarnations):
                    self._incarnation[engine] = number
            case Launch() if self._step is not None:
                self._step.launch(command, self._now_s)
            case TrainOn() if self._step is not None:
                self._step.train_on_s = self._now_s
            case Commit() if self._step is not None and self._step.commit_s is None:
                self._step.commit_s, self._step.is_judging = self._now_s, False
                self._step.is_last = command.last or command.stopping
            case _:
                pass


@dataclass(slots=True)
class _Step:
    """The times at which a step passed from one phase to the next, in seconds without waits."""

    begin_s: float
    round: int | None = None
    """Number of the current round (one batch of generation). None before the first."""
    kind: RoundKind | None = None
    round_begin_s: float = 0.0
    ended_s: float | None = None
    """Time in seconds when the latest sample of the current round ended. None if none has ended."""
    rollout_s: dict[str, float] = field(default_factory=dict)
    """Seconds of generation in the step's earlier rounds, by the kind of round."""
    between_s: float = 0.0
    """Seconds of the step between a round's last sample and the next round or the training."""
    begun_s: float = 0.0
    """Seconds of gradients computed during generation, before the command `TrainOn` (train)."""
    train_on_s: float | None = None
    synced_s: float | None = None
    commit_s: float | None = None
    is_last: bool = False
    is_judging: bool = False
    """Whether the step awaits rewards, with generation done and the rollout pool given back."""
    evaluated_s: float | None = None
    """Seconds of generation for the step's evaluation. None if the step had none."""

    @property
    def waits_for_parking(self) -> bool:
        """Whether moving the job off its devices (parking) now delays the step: yes after training
        or at the commit; no while rewards are awaited."""
        is_over = self.synced_s is not None or self.commit_s is not None
        return is_over and not self.is_judging

    def evaluate(self, note: Note) -> None:
        """Add the seconds of an evaluation, from its note in the log. Old logs do not tell the
        seconds of generation apart: then the whole evaluation counts as generation."""
        callbacks_s = note.metrics.get(CALLBACK_SECONDS, 0.0)
        generated_s = note.metrics.get(EVALUATION_ROLLOUT, note.seconds - callbacks_s)
        self.evaluated_s = (self.evaluated_s or 0.0) + generated_s
        self.is_judging = False

    def launch(self, command: Launch, now: float) -> None:
        if command.round == self.round:
            return  # one more sample of it
        if self.round is None:
            self.round_begin_s = self.begin_s
        else:
            self.close_round(now)
            self.round_begin_s = now
        self.round, self.kind, self.ended_s = command.round, command.kind, None

    def close_round(self, now: float) -> None:
        """End the current round of generation, if there is one. `now`: time in seconds when the
        next round or training begins; from the round's last sample to it is `between_s`."""
        if self.kind is None:
            return
        ended_s = now if self.ended_s is None else self.ended_s
        before_s = self.rollout_s.get(str(self.kind), 0.0)
        self.rollout_s[str(self.kind)] = before_s + ended_s - self.round_begin_s
        self.kind = None
        self.between_s += now - ended_s

    def times(self, step: int, now: float) -> Iteration:
        commit_s = now if self.commit_s is None else self.commit_s
        synced_s = commit_s if self.synced_s is None else self.synced_s
        train_on_s = synced_s if self.train_on_s is None else self.train_on_s
        self.close_round(train_on_s)
        seconds = self.rollout_s
        kind = max(seconds, key=lambda kind: seconds[kind], default=str(RoundKind.PLAIN))
        evaluated_s = min(self.evaluated_s or 0.0, now - synced_s)
        return Iteration(
            step=step,
            kind=(EMPTY if self.train_on_s is None else kind)
            + (EVALUATED if self.evaluated_s is not None else ""),
            rollout_s=sum(seconds.values()) + evaluated_s,
            between_s=self.between_s,
            train_s=synced_s - train_on_s + self.begun_s,
            after_s=now - synced_s - evaluated_s,
            last=self.is_last,
        )
