"""The job: a whole run as one state machine. `job.handle(event) -> [command, ...]`.

    FetchPrompts -> Launch -> (Score, Abort, Defer) -> TrainOn -> SyncWeights -> Commit -> next
                    ^ one Round at a time decides these

    phase       waits for                                   and is left by
    new         RunStarted                                  RunStarted
    fetching    prompts from the dataset cursor             PromptsFetched
    rolling     responses, then the verdicts on those kept  the Round is closed
    training    the optimizer step                          Trained
    syncing     the engines to take the new weights         WeightsSynced
    committing  the step to become durable                  Committed
    done        nothing

The job holds the long queue and the ledger, and decides which kind of round comes next. It is the
only thing that a driver talks to; controller and simulator drive the same code.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, assert_never

from rollpacker.core.commands import (
    Command,
    Commit,
    FetchPrompts,
    Finish,
    RoundKind,
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
from rollpacker.core.ledger import Ledger
from rollpacker.core.rounds import Round, RoundPlan, StrayEventError, TailBatchingConfig


class Phase(StrEnum):
    NEW = "new"
    FETCHING = "fetching"
    ROLLING = "rolling"
    TRAINING = "training"
    SYNCING = "syncing"
    COMMITTING = "committing"
    DONE = "done"


MAX_EMPTY_STEPS = 3
"""So many steps in a row without anything to train on end the run."""


class ProtocolError(AssertionError):
    """The driver sent an event that does not fit the phase: a bug in the driver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """What the core needs to know of a run's configuration."""

    prompts_per_step: int
    samples_per_prompt: int
    max_steps: int | None
    """Steps, not counting those that empty the long queue at the end. None: until the data ends."""
    tail_batching: TailBatchingConfig = field(default_factory=TailBatchingConfig)
    max_retries: int = 2
    """Replacements per prompt and round for samples that the engine failed on."""

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> JobConfig:
        return cls(**{**plain, "tail_batching": TailBatchingConfig(**plain["tail_batching"])})


class Job:
    def __init__(self, config: JobConfig) -> None:
        self.config = config
        self.phase = Phase.NEW
        self.step = 0
        """Steps committed."""
        self.version = 0
        """Optimizer steps applied; a step without any trainable group does not add one."""
        self.ledger = Ledger()
        self.queue: deque[tuple[PromptId, int]] = deque()
        """The long queue: deferred prompts and the attempt that comes next, first in, first out."""
        self.num_late = Counter[str]()
        """Late events, by event name."""
        self._num_rounds = 0
        self._fresh: list[PromptId] = []
        """Fetched for the round that is being put together."""
        self._draining = False
        """The epoch or the run ends: the queue is emptied before anything fresh is fetched."""
        self._data_ended = False
        self._round: Round | None = None
        self._late_verdicts: set[SampleId] = set()
        """Handed to the reward in an earlier round; the answer will be ignored."""
        self._num_empty_steps = 0
        self._stop_reason: str | None = None

    def handle(self, event: Event) -> list[Command]:
        match event:
            case SampleGenerated():
                return self._in_round("generation", event)
            case SampleScored():
                return self._on_scored(event)
            case SampleAborted():
                return self._in_round("abort", event)
            case SampleFailed():
                return self._in_round("failure", event)
            case PromptsFetched():
                return self._on_fetched(event)
            case Trained():
                return self._on_trained(event)
            case WeightsSynced():
                return self._on_synced(event)
            case Committed():
                return self._on_committed(event)
            case StopRequested():
                self._stop_reason = self._stop_reason or event.reason
                return []
            case RunStarted():
                self._expect(Phase.NEW, event)
                return self._next_step()
            case _:
                assert_never(event)

    def waiting_for(self) -> str:
        """What the job waits for, in words, for the message of a deadline."""
        match self.phase:
            case Phase.ROLLING:
                assert self._round is not None
                return self._round.waiting_for()
            case Phase.FETCHING:
                return "prompts from the dataset"
            case Phase.TRAINING:
                return f"the optimizer step of step {self.step + 1}"
            case Phase.SYNCING:
                return f"the engine to take version {self.version} of the weights"
            case Phase.COMMITTING:
                return f"the commit of step {self.step}"
            case Phase.NEW | Phase.DONE:
                return "nothing"

    @property
    def waits_for_rewards(self) -> bool:
        """The engine is done with the round; only verdicts are missing."""
        return self._round is not None and not self._round.generating

    # -- choosing the next round -------------------------------------------------------

    def _next_step(self) -> list[Command]:
        config = self.config
        if not self.queue:
            self._draining = False
        if self._out_of_steps():
            self._draining = True
        if self._num_empty_steps == MAX_EMPTY_STEPS:
            reason = f"{MAX_EMPTY_STEPS} steps in a row had no group to train on"
            return self._finish(reason, failed=True)
        if self._nothing_left():
            return self._finish("every step is done" if self._out_of_steps() else "the data ended")
        if len(self.queue) >= config.prompts_per_step:
            return self._start_queue_round(RoundKind.LONG)
        if self._draining and self.queue:
            return self._start_queue_round(RoundKind.FLUSH)
        self._fresh = []
        return self._fetch()

    def _out_of_steps(self) -> bool:
        return self.config.max_steps is not None and self.step >= self.config.max_steps

    def _nothing_left(self) -> bool:
        return not self.queue and (self._data_ended or self._out_of_steps())

    def _fetch(self) -> list[Command]:
        self.phase = Phase.FETCHING
        wanted = self.config.tail_batching.num_prompts(self.config.prompts_per_step)
        return [FetchPrompts(count=wanted - len(self._fresh))]

    def _on_fetched(self, event: PromptsFetched) -> list[Command]:
        self._expect(Phase.FETCHING, event)
        config, tail = self.config, self.config.tail_batching
        self.ledger.fetch(event.prompts)
        self._fresh += event.prompts
        wanted = tail.num_prompts(config.prompts_per_step)
        self._data_ended = event.data_ended
        epoch_flush = event.epoch_ended and (tail.flush_each_epoch or not tail.enabled)
        if not event.data_ended and not epoch_flush and len(self._fresh) < wanted:
            if not event.prompts and not event.epoch_ended:
                raise ProtocolError("the cursor gave no prompt although its epoch goes on")
            return self._fetch()
        if event.data_ended or epoch_flush:
            self._draining = True
        if not tail.enabled and self._fresh:
            return self._start_fresh_round(RoundKind.PLAIN)
        if len(self._fresh) >= config.prompts_per_step:
            return self._start_fresh_round(RoundKind.SHORT)
        # Too few for a race: what is left of the epoch goes through the queue with the stragglers.
        self.queue.extend((prompt, 0) for prompt in self._fresh)
        return self._next_step()

    def _start_fresh_round(self, kind: RoundKind) -> list[Command]:
        config, tail = self.config, self.config.tail_batching
        prompts, self._fresh = self._fresh, []
        return self._start(
            kind,
            [(prompt, 0) for prompt in prompts],
            num_samples=tail.num_samples(config.samples_per_prompt),
            prompts_needed=min(config.prompts_per_step, len(prompts)),
        )

    def _start_queue_round(self, kind: RoundKind) -> list[Command]:
        count = min(self.config.prompts_per_step, len(self.queue))
        prompts = [self.queue.popleft() for _ in range(count)]
        return self._start(
            kind, prompts, num_samples=self.config.samples_per_prompt, prompts_needed=count
        )

    def _start(
        self,
        kind: RoundKind,
        prompts: list[tuple[PromptId, int]],
        *,
        num_samples: int,
        prompts_needed: int,
    ) -> list[Command]:
        self._num_rounds += 1
        plan = RoundPlan(
            number=self._num_rounds,
            kind=kind,
            version=self.version,
            prompts=tuple(prompts),
            num_samples=num_samples,
            samples_needed=self.config.samples_per_prompt,
            prompts_needed=prompts_needed,
            race=self.config.tail_batching.race,
            max_retries=self.config.max_retries,
        )
        self._round = Round(plan)
        self.phase = Phase.ROLLING
        return self._round.launch()

    # -- the round at hand -------------------------------------------------------------

    def _in_round(
        self, what: str, event: SampleGenerated | SampleAborted | SampleFailed | SampleScored
    ) -> list[Command]:
        if self._round is None:
            raise StrayEventError(f"{what} of {event.sample} while no round is under way")
        late_before = self._round.num_late
        match event:
            case SampleGenerated():
                commands = self._round.on_generated(event)
            case SampleScored():
                commands = self._round.on_scored(event)
            case SampleAborted():
                commands = self._round.on_aborted(event)
            case SampleFailed():
                commands = self._round.on_failed(event)
            case _:
                assert_never(event)
        if self._round.num_late != late_before:
            self.num_late[type(event).__name__] += 1
        if self._round.closed:
            commands += self._close_round(self._round)
        return commands

    def _on_scored(self, event: SampleScored) -> list[Command]:
        if event.sample in self._late_verdicts:
            self._late_verdicts.remove(event.sample)
            self.num_late["SampleScored"] += 1
            return []
        return self._in_round("a verdict", event)

    def _close_round(self, round_: Round) -> list[Command]:
        groups, drops = round_.close()
        self._late_verdicts.update(round_.unanswered())
        self.queue.extend(round_.deferred())
        self._round = None
        for drop in drops:
            self.ledger.drop(drop.prompt, drop.reason)
        for group in groups:
            self.ledger.train(group[0].prompt)
        self.ledger.check()
        self._num_empty_steps = 0 if groups else self._num_empty_steps + 1
        if not groups:
            return [*drops, *self._commit()]
        self.phase = Phase.TRAINING
        return [*drops, TrainOn(step=self.step + 1, groups=groups)]

    # -- after the round ---------------------------------------------------------------

    def _on_trained(self, event: Trained) -> list[Command]:
        self._expect(Phase.TRAINING, event)
        if event.step != self.step + 1 or event.version != self.version + 1:
            raise ProtocolError(
                f"trained step {event.step} to version {event.version}, expected step "
                f"{self.step + 1} and version {self.version + 1}"
            )
        self.version = event.version
        self.phase = Phase.SYNCING
        return [SyncWeights(version=self.version)]

    def _on_synced(self, event: WeightsSynced) -> list[Command]:
        self._expect(Phase.SYNCING, event)
        if event.version != self.version:
            raise ProtocolError(f"synced version {event.version} instead of {self.version}")
        return self._commit()

    def _commit(self) -> list[Command]:
        self.phase = Phase.COMMITTING
        self.step += 1
        stopping = self._stop_reason is not None
        return [Commit(step=self.step, last=self._nothing_left(), stopping=stopping)]

    def _on_committed(self, event: Committed) -> list[Command]:
        self._expect(Phase.COMMITTING, event)
        if event.step != self.step:
            raise ProtocolError(f"committed step {event.step} instead of {self.step}")
        if self._stop_reason is None:
            return self._next_step()
        if not event.checkpointed:  # the wish to stop came while the commit was under way
            return [Commit(step=self.step, last=self._nothing_left(), stopping=True)]
        return self._finish(self._stop_reason)

    def _finish(self, reason: str, *, failed: bool = False) -> list[Command]:
        self.phase = Phase.DONE
        return [Finish(reason=reason, failed=failed)]

    def _expect(self, phase: Phase, event: Event) -> None:
        if self.phase is not phase:
            raise ProtocolError(f"{type(event).__name__} in phase {self.phase}")

    # -- checkpoints -------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds. Only between `Commit` and `Committed`, when nothing is in
        flight."""
        if self.phase is not Phase.COMMITTING:
            raise ProtocolError(f"a job cannot be saved in phase {self.phase}")
        return {
            "step": self.step,
            "version": self.version,
            "num_rounds": self._num_rounds,
            "queue": [[str(prompt), attempt] for prompt, attempt in self.queue],
            "draining": self._draining,
            "data_ended": self._data_ended,
            "num_empty_steps": self._num_empty_steps,
            "num_late": dict(sorted(self.num_late.items())),
            "ledger": self.ledger.state(),
        }

    @classmethod
    def restore(
        cls, config: JobConfig, state: Mapping[str, Any], *, data_ended: bool | None = None
    ) -> Job:
        """The job as it was when it said `Commit`; it goes on when it is given `Committed` for that
        step.

        `data_ended` is what the cursor says now, if the run was given more epochs since.
        """
        job = cls(config)
        job.phase = Phase.COMMITTING
        job.step = state["step"]
        job.version = state["version"]
        job._num_rounds = state["num_rounds"]
        job.queue = deque((PromptId.parse(text), attempt) for text, attempt in state["queue"])
        job._draining = state["draining"]
        job._data_ended = state["data_ended"] if data_ended is None else data_ended
        # A run that ended for it gets another chance: its user may have mended the cause.
        job._num_empty_steps = state["num_empty_steps"] % MAX_EMPTY_STEPS
        job.num_late = Counter(state["num_late"])
        job.ledger = Ledger.restore(state["ledger"])
        return job
