"""The history of a run, step by step, read from its event log.

    events, commands, notes, sessions  ->  History.feed  ->  a StepHistory at every commit

Every report on a run (seconds, metrics, summary, trace, timeline, fit, what-if) is a function of
these records. Only this module of `report` interprets events and commands; an event or command that
has no `case` here changes no record.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rollpacker.core.commands import (
    NOWHERE,
    Abort,
    Act,
    CancelAct,
    Command,
    Commit,
    Conclude,
    Continue,
    Defer,
    Drop,
    Enter,
    Finish,
    Launch,
    Leave,
    Move,
    Place,
    Release,
    Resize,
    Score,
    StartGradients,
    SyncWeights,
    TrainOn,
)
from rollpacker.core.events import (
    Acted,
    Committed,
    EngineLost,
    EngineReady,
    Entered,
    Event,
    PoolNeeded,
    PromptsFetched,
    SampleAborted,
    SampleFailed,
    SampleGenerated,
    SampleScored,
    Trained,
    TrainerLost,
    TrainerReady,
    WeightsSynced,
)
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.records import Entry, Note, Record, Session
from rollpacker.report.carrying import CarryBook
from rollpacker.report.checks import CheckBook
from rollpacker.report.engine_book import EngineBook
from rollpacker.report.phase_book import PhaseBook
from rollpacker.report.step_history import (
    End,
    Outcome,
    RoundHistory,
    SampleHistory,
    StepHistory,
)
from rollpacker.report.turn_book import ENVIRONMENT, TurnBook


@dataclass(slots=True)
class TrainerBook:
    """What the trainer does, how often it was lost (`losses`) and for how long, up to the last log
    entry that `History` has read."""

    num_streaming: int = 0
    """Number of prompts (with all their samples) whose gradients are computed during generation."""
    losses: int = 0
    away_s: float = 0.0
    """Sum of the seconds from each loss of the trainer until it was back."""
    interrupted: str = ""
    """What the run was doing (as in `History.phase`) when the trainer was lost. Empty: no loss."""
    _lost_since: float | None = None

    def begin_session(self) -> None:
        """Forget what was under way: a new process of the run has a trainer of its own."""
        self.num_streaming, self.interrupted, self._lost_since = 0, "", None

    def lose(self, now: float) -> None:
        """Note at time `now` that the trainer was lost, with all gradients computed so far."""
        self.num_streaming = 0
        self.losses += 1
        if self._lost_since is None:
            self._lost_since = now

    def ready(self, now: float) -> None:
        """Note that the trainer is back, at the time `now`."""
        if self._lost_since is not None:
            self.away_s += now - self._lost_since
            self._lost_since = None


class History:
    """Builds the records of a run from its log entries, live or from a file: `feed` returns a
    `StepHistory` whenever a step is committed. `feed` takes constant time, but at a launch and at a
    step's end a time linear in the step's samples.

    Attributes can be read at any time: `step` is the step under way, `phase` what the run is doing
    (rollout, environment, reward_wait, training, sync, checkpoint, recovery, controller; where jobs
    share pools of devices also pool_wait and evaluation), `live` the samples that engines generate,
    and `queue` the prompts that were put off to a later round. If a session (process of the run)
    starts the step anew, `step` is replaced and its contents are gone, as they are for the run."""

    def __init__(self) -> None:
        self.step = StepHistory()
        self.last_step = 0
        """Number of the last step that was committed; 0 before the first."""
        self.live: set[SampleId] = set()
        self.queue: set[PromptId] = set()
        self.num_sessions = 0
        self.marks: set[str] = set()
        """Warnings on the metrics of all processes of the run so far, such as "unsandboxed"."""
        self.engines = EngineBook()
        self.evaluations: dict[int, Mapping[str, float]] = {}
        """Metrics of each evaluation, by the number of the step before the evaluation."""
        self.finish: Finish | None = None
        """The command that ended the run. None if the run goes on, or was killed."""
        self._phases = PhaseBook()
        self._turns = TurnBook()
        self._emptied_s: float | None = None
        """Time at which the event that is being read took the last sample of the round out of the
        engines. None if it did not."""
        self.trainer = TrainerBook()
        self._is_committing = False
        self._carrying = CarryBook()
        self._checks = CheckBook()

    @property
    def phase(self) -> str:
        return self._phases.now

    @property
    def session(self) -> Session | None:
        """The current session (process of the run). None before the first."""
        return self.step.session

    def feed(self, entry: Entry) -> StepHistory | None:
        if isinstance(entry, Record):
            return self.take(entry.time_s, entry.event, entry.commands)
        if isinstance(entry, Note):
            self._note(entry)
        else:
            self._begin_session(entry)
        return None

    def so_far(self, step: int, now: float) -> StepHistory:
        """The record of the uncommitted step, with the number `step`, as of time `now`."""
        self.step.prompts.long_queue = len(self.queue)
        self.step.settle()
        return dataclasses.replace(self.step, step=step, end_s=now)

    def take(self, now: float, event: Event, commands: Sequence[Command]) -> StepHistory | None:
        """Read an event, logged at time `now`, and the commands with which the run answered it, as
        `feed` does for a `Record`. Returns the step that the commands commit, or None."""
        done = self._event(event, now)
        for command in commands:
            self._command(command, now)
        if self._emptied_s is not None:
            self._end_round()
        return done

    # -- around the core -----------------------------------------------------------------

    def _begin_session(self, session: Session) -> None:
        self.num_sessions += 1
        self._carrying.begin_session(session.job)
        self.engines.begin_session(session.job)
        self.marks.update(session.marks)
        self._checks.begin_session()
        self._phases.begin_session()
        self.trainer.begin_session()
        if self._is_committing:
            self.step.session, self.step.turns.commit_s = session, None
            return
        # Whatever was in flight in the session before is launched again by the `Committed` that
        # follows.
        self.step = StepHistory(start_s=session.time_s, session=session)
        self.live.clear()
        self._phases.begin()

    def _note(self, note: Note) -> None:
        self.step.notes.append(note)
        if note.name == "salvaged":
            for round_ in self.step.rounds:
                round_.is_irregular = True
            return
        if note.name != "gradients":
            self._phases.span(self.step, note)
            if note.name == "evaluation" and note.metrics:
                self.evaluations[note.step] = note.metrics
            return
        self.trainer.num_streaming = max(
            0, self.trainer.num_streaming - int(note.metrics.get("groups", 0))
        )
        if (
            self.phase == "training"
            and not self.trainer.num_streaming
            and self.step.train_on is None
        ):
            self._turn("reward_wait", note.time_s)

    # -- events --------------------------------------------------------------------------

    def _event(self, event: Event, now: float) -> StepHistory | None:
        match event:
            case SampleGenerated() | SampleAborted() | SampleFailed() if self.engines.is_zombie(
                event
            ):
                pass
            case SampleScored():
                self._checks.scored(event, self.step, now)
            case SampleGenerated():
                end = End.AT_LIMIT if event.finish_reason == "length" else End.FINISHED
                self._let_go(self._end_sample(event, end, now), event)
            case SampleAborted():
                self._let_go(self._end_sample(event, End.STOPPED, now), event)
                self.step.samples[event.sample].outcome = Outcome.SURPLUS
            case SampleFailed():
                self._end_sample(event, End.FAILED, now).outcome = Outcome.FAILED
                self.step.prompts.lose(event.sample, event.reason)
            case Acted():
                self._turns.acted(event, self.step, now)
                if self.phase == ENVIRONMENT and not self._turns.acting:
                    self._turn("reward_wait", now)
            case EngineLost():
                self._lose(event, now)
            case EngineReady():
                self.engines.ready(event, now)
            case TrainerLost():
                self._lose_trainer(now)
            case TrainerReady():
                self._restore_trainer(now)
            case PromptsFetched():
                # Fetched and never launched in a step of its own means: joined the long queue at an
                # epoch's end.
                self.queue.update(event.prompts)
                self.step.prompts.fetched += event.prompts
            case PoolNeeded() if event.purpose == "evaluation":
                self._phases.evaluate(self.step, now)
            case Entered():
                self._phases.end_wait(self.step, now, event.switch_s)
            case Trained():
                self.step.trainer = event.metrics
                self.step.turns.trained_s = now
                self._turn("controller", now)
            case WeightsSynced():
                self.step.turns.synced_s = now
                self._turn("controller", now)
            case Committed():
                return self._commit(event, now)
            case _:
                pass
        return None

    def _let_go(self, sample: SampleHistory, event: SampleGenerated | SampleAborted) -> None:
        """Note how many tokens a sample had when an engine finished or stopped it."""
        self._carrying.drawn(sample, event)
        sample.preemptions += event.preemptions
        sample.num_redraws = event.num_redraws
        if self.step.rounds:
            self._carrying.end(sample, self.step.rounds[-1].version)

    def _end_sample(
        self, event: SampleGenerated | SampleAborted | SampleFailed, end: End, now: float
    ) -> SampleHistory:
        step, sample = self.step, event.sample
        self.engines.end(event, now)
        found = step.samples.get(sample)
        if found is None:  # lines are missing
            found = step.samples[sample] = SampleHistory(sample, now)
        found.end_s, found.end = now, end
        live = self.live
        if sample not in live:
            return found
        live.remove(sample)
        round_ = step.rounds[-1]
        if end is End.FAILED:
            round_.is_irregular = True
        else:
            round_.ends.append(found)
        if not live:
            self._emptied_s = now
            if self.phase == "rollout":
                self._turn("training" if self.trainer.num_streaming else "reward_wait", now)
        return found

    def _end_round(self) -> None:
        """End the round if the log entry just read has left no sample in any engine."""
        if self._emptied_s is not None:
            self.step.rounds[-1].end_s, self._emptied_s = self._emptied_s, None

    def _lose(self, event: EngineLost, now: float) -> None:
        """Note at time `now` that an engine was lost. Its samples are in none until they start
        again."""
        gone = self.engines.lose(event, now)
        self.live.difference_update(gone)
        if gone:
            self.step.rounds[-1].is_irregular = True
            if not self.live:
                self._emptied_s = now

    def _lose_trainer(self, now: float) -> None:
        """Note that the trainer was lost. A phase that needs the trainer gives way to the phase
        recovery; a round of generation goes on."""
        self.trainer.lose(now)
        if self.phase == "training" and self.step.train_on is None:
            self._turn("reward_wait", now)
        elif self.phase in ("training", "sync", "checkpoint"):
            self.trainer.interrupted = self.phase
            self._turn("recovery", now)

    def _restore_trainer(self, now: float) -> None:
        self.trainer.ready(now)
        if self.phase == "recovery":
            self._turn(self.trainer.interrupted, now)

    def _place(self, command: Place, now: float) -> None:
        self.engines.place(command.samples, command.engines, now)
        self.live.update(command.samples)
        round_ = self.step.rounds[-1]
        round_.is_irregular = True
        self._emptied_s = round_.end_s = None
        round_.peak_live = max(round_.peak_live, len(self.live))
        self._turn("rollout", now)

    def _commit(self, event: Committed, now: float) -> StepHistory | None:
        self._is_committing = False
        self._turn("controller", now)
        if event.step <= self.last_step:
            # A resumed run is given its last `Committed` again.
            self.step.turns.committed_before_s = now
            return None
        done = self.step
        self.step = StepHistory(start_s=now, session=done.session)
        self.step.turns.committed_before_s = now
        done.step, done.end_s, done.checkpointed = event.step, now, event.checkpointed
        done.prompts.long_queue = len(self.queue)
        self.last_step = event.step
        self.live.clear()
        self.engines.clear()
        self.trainer.num_streaming = 0
        self._carrying.commit(self.queue)
        done.settle()
        return done

    # -- commands ------------------------------------------------------------------------

    def _command(self, command: Command, now: float) -> None:
        step = self.step
        match command:
            case Score():
                self._checks.ask(command, step, now)
            case Launch():
                self._launch(command, now)
            case Place():
                self._place(command, now)
            case Act() | CancelAct() | Conclude():
                self._turns.take(command, step, now)
                if self._turns.acting and self.phase in ("reward_wait", "controller"):
                    self._turn(ENVIRONMENT, now)
            case Continue() if step.rounds:
                self._go_on(command, now)
            case Move():
                self.engines.place(command.samples, (command.engine,) * len(command.samples), now)
                if step.rounds:
                    step.rounds[-1].is_irregular = True
            case Release() if step.rounds:
                degree = step.rounds[-1].tensor_parallel
                self.engines.release({device // degree for device in command.devices})
            case Resize():
                self.engines.resize(command, self.last_step + 1, now)
            case Abort():
                if step.rounds:
                    step.rounds[-1].told_to_stop_s = now
            case Defer():
                step.prompts.deferred.update(command.prompts)
                self.queue.update(command.prompts)
            case Drop():
                step.prompts.drop(command)
                self.queue.discard(command.prompt)
            case StartGradients():
                step.streamed += command.groups
                self.trainer.num_streaming += len(command.groups)
                if self.phase == "reward_wait":
                    self._turn("training", now)
            case TrainOn():
                step.train_on, step.turns.train_on_s = command, now
                self.trainer.num_streaming = 0
                self._turn("training", now)
            case SyncWeights():
                self._turn("sync", now)
            case Commit():
                self._is_committing = True
                step.turns.commit_s = now
                self._turn("checkpoint", now)
            case Enter():
                self._phases.wait(step, now)
            case Leave():  # also of a pool that is waited for
                self._phases.end_wait(step, now)
            case Finish():
                self.finish = command
            case _:
                pass

    def _launch(self, command: Launch, now: float) -> None:
        step, samples = self.step, command.samples
        goes_on = self.live or self._emptied_s is not None or self._turns.acting
        if goes_on and step.rounds and step.rounds[-1].number == command.round:
            round_ = step.rounds[-1]
            round_.is_irregular = True
            round_.samples += samples
        else:
            self.live.clear()  # if something is left, lines are missing: its end was never logged
            self._end_round()
            self.engines.release()
            round_ = RoundHistory(
                number=command.round,
                kind=command.kind,
                version=command.version,
                tensor_parallel=command.tensor_parallel,
                samples=samples,
                start_s=now,
                slots=None if step.session is None else step.session.slots,
                num_engines=self.engines.num_engines,
                engines=command.engines,
                is_irregular=NOWHERE in command.engines,
            )
            step.rounds.append(round_)
        known = step.samples
        for sample in samples:
            known[sample] = SampleHistory(sample, now)
        self._carrying.launch(command, known)
        self.queue.difference_update({sample.prompt for sample in samples})
        self.live.update(samples)
        self.engines.place(samples, command.engines, now)
        self.live.difference_update(self.engines.nowhere(samples))
        self._emptied_s = None
        round_.peak_live = max(round_.peak_live, len(self.live))
        self._turn("rollout", now)

    def _go_on(self, command: Continue, now: float) -> None:
        self._turns.go_on(command, self.step, now)
        self.live.update(command.samples)
        self.engines.place(command.samples, command.engines, now)
        self._emptied_s = None
        self._turn("rollout", now)

    def _turn(self, phase: str, now: float) -> None:
        self._phases.turn(self.step, phase, now)


def iterate_steps(entries: Iterable[Entry], *, unfinished: bool = False) -> Iterator[StepHistory]:
    """Yields the committed steps of a log, one at a time. With `unfinished` also those that a
    process of the run left without a commit, with step number 0, and at last the one under way."""
    history = History()
    for entry in entries:
        step = history.step
        done = history.feed(entry)
        if done is not None or (unfinished and history.step is not step):
            yield step
    if unfinished:
        yield history.step
