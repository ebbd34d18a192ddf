"""Records of one step: rounds, samples with their ends and verdicts, phases, prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from rollpacker.core.commands import Drop, RoundKind, Score, TrainOn
from rollpacker.core.events import SampleScored
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.records import POOL_SWITCH, Note, Session
from rollpacker.core.rounds.round import TOO_FEW_RESPONSES, TOO_FEW_VERDICTS
from rollpacker.report.episodes import MAX_REASON, StepEpisodes

POOL_WAIT = "pool_wait"
"""With `POOL_SWITCH`, phases, and causes of time, of a run that shares its pools: until one is its,
and until parked processes have woken up there. The second is also the name of a note: of parking,
where something waits for that."""
_FOR_LOSSES = {*TOO_FEW_RESPONSES.values(), *TOO_FEW_VERDICTS.values()}
"""Why prompts are dropped whose samples came to nothing."""


class End(StrEnum):
    """How a sample's generation ended."""

    FINISHED = "finished"
    AT_LIMIT = "finished at the length limit"
    STOPPED = "stopped"
    FAILED = "failed"


class Outcome(StrEnum):
    """The outcome of a sample."""

    TRAINED = "trained on"
    SURPLUS = "surplus, stopped"
    DEFERRED = "prompt deferred"
    UNUSED = "finished, not used"
    FAILED = "failed"


@dataclass(slots=True)
class Verdict:
    """One answer of a reward. A check that was asked for again has several."""

    event: SampleScored
    time_s: float
    asked_s: float | None
    """When the check was asked for; None if no process that still lives asked for it."""
    queue_s: float
    """From the end of the response to the first asking."""


class CarriedInto(NamedTuple):
    """Tokens that an earlier launch left for a sample."""

    num_tokens: int
    whole: bool
    """Whether the tokens are a complete response."""
    version: int
    """Version of the weights that the tokens were last drawn from, or the oldest one if they were
    drawn from several."""


@dataclass(slots=True)
class SampleHistory:
    """One launched sample. A sample that ends without a launch in the log starts where it ends."""

    sample: SampleId
    start_s: float
    carried: CarriedInto | None = None
    num_kept: int | None = None
    """Number of carried tokens that came out the same when they were drawn again. None if that was
    not checked."""
    num_redraws: int = 0
    end_s: float | None = None
    end: End | None = None
    """None while it is being generated."""
    num_tokens: int = 0
    preemptions: int = 0
    verdict: Verdict | None = None
    """The last verdict on the sample. None if there is none."""
    outcome: Outcome = Outcome.UNUSED
    """Final once the step is committed."""

    @property
    def num_taken_up(self) -> int:
        """Tokens that an earlier launch generated."""
        if self.num_kept is not None or self.carried is None:
            return self.num_kept or 0
        return min(self.carried.num_tokens, self.num_tokens)

    @property
    def num_generated(self) -> int:
        """Tokens that this launch generated."""
        return self.num_tokens - self.num_taken_up

    @property
    def reward(self) -> float | None:
        return None if self.verdict is None else self.verdict.event.value

    @property
    def is_finished(self) -> bool:
        """Whether the sample is a whole response, which may be cut at the length limit."""
        return self.end is End.FINISHED or self.end is End.AT_LIMIT


@dataclass(slots=True)
class RoundHistory:
    """One rollout."""

    number: int
    kind: RoundKind
    version: int
    """Version of the weights that the round's samples come from."""
    tensor_parallel: int
    samples: tuple[SampleId, ...]
    start_s: float
    slots: int | None
    """Slots of all engines together, as the session recorded them. None if it did not."""
    num_engines: int = 1
    engines: tuple[int, ...] = ()
    """The engine that each sample began in, aligned with `samples`. Empty: all began in the first
    engine."""
    end_s: float | None = None
    """When the last of the samples ended or failed. None if some have not ended, as far as the log
    says."""
    ends: list[SampleHistory] = field(default_factory=list)
    """Samples in the order in which they finished or were stopped. Samples that failed are not
    here."""
    is_irregular: bool = False
    """Whether a sample failed, was launched once more in the same round, or changed its engine."""
    peak_live: int = 0
    """Samples that were live at once, at most."""
    told_to_stop_s: float | None = None
    """When samples were last told to stop; None: none was."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of the step besides rollout: reward_wait, training, sync, checkpoint, recovery,
    pool_wait, switch, or a note's name (evaluation, callbacks, startup). No two of a step
    overlap: one that a note falls into is told in two."""

    name: str
    start_s: float
    end_s: float


@dataclass(slots=True)
class Turns:
    """When a step passed from one stage to the next. None: it did not, as far as the log says."""

    committed_before_s: float | None = None
    """The commit of the step before, if it was in the same session."""
    train_on_s: float | None = None
    trained_s: float | None = None
    synced_s: float | None = None
    commit_s: float | None = None
    """The `Commit` command; None as well if another session took the run up before the answer."""


@dataclass(slots=True)
class StepPrompts:
    """Prompts of a step that were not trained on, by what became of them."""

    fetched: list[PromptId] = field(default_factory=list)
    deferred: set[PromptId] = field(default_factory=set)
    dropped: Counter[str] = field(default_factory=Counter)
    """Number of dropped prompts, by reason."""
    dropped_after: dict[str, str] = field(default_factory=dict)
    """For each reason, why the last lost sample of the first prompt dropped for it was lost."""
    long_queue: int = 0
    """How many waited for a long round, or for another race, when the step was committed."""
    _lost: dict[PromptId, str] = field(default_factory=dict)
    """For each prompt, why the latest of its lost samples was lost."""

    def lose(self, sample: SampleId, reason: str) -> None:
        """Note that a sample was lost."""
        self._lost[sample.prompt] = reason

    def drop(self, command: Drop) -> None:
        """Note that a prompt will never be trained on."""
        self.dropped[command.reason] += 1
        after = self._lost.get(command.prompt)
        if after is not None and command.reason in _FOR_LOSSES:
            self.dropped_after.setdefault(command.reason, after[:MAX_REASON])


@dataclass(slots=True)
class StepChecks:
    """The checks that began in a step and those that ended in it: not always the same ones."""

    asked: list[Score] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)


@dataclass(slots=True)
class StepHistory:
    """One optimizer step and the rounds that fed it. Times are seconds since the run began."""

    start_s: float = 0.0
    """When the step before was committed, or when the session began."""
    step: int = 0
    """The number of the step; 0 until it is committed."""
    end_s: float = 0.0
    checkpointed: bool = False
    session: Session | None = None
    """The session that the step is in, or that committed it."""
    rounds: list[RoundHistory] = field(default_factory=list)
    samples: dict[SampleId, SampleHistory] = field(default_factory=dict)
    """Samples in the order of their launches."""
    prompts: StepPrompts = field(default_factory=StepPrompts)
    checks: StepChecks = field(default_factory=StepChecks)
    episodes: StepEpisodes = field(default_factory=StepEpisodes)
    streamed: list[tuple[SampleId, ...]] = field(default_factory=list)
    """Groups whose gradients were asked for before the step was due."""
    train_on: TrainOn | None = None
    trainer: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the optimizer step."""
    turns: Turns = field(default_factory=Turns)
    phases: list[Phase] = field(default_factory=list)
    """Phases in the order in which they ended."""
    notes: list[Note] = field(default_factory=list)

    @property
    def kind(self) -> RoundKind | None:
        """The kind of the first round. Rounds that refill a step may be of other kinds."""
        return self.rounds[0].kind if self.rounds else None

    @property
    def version(self) -> int:
        return self.rounds[-1].version if self.rounds else 0

    @property
    def groups(self) -> Sequence[tuple[SampleId, ...]]:
        """Groups that the step was trained on."""
        return () if self.train_on is None else self.train_on.groups

    @property
    def num_launched(self) -> int:
        """Samples."""
        return sum(len(round_.samples) for round_ in self.rounds)

    @property
    def num_streamed(self) -> int:
        """Samples."""
        return sum(map(len, self.streamed))

    @property
    def peak_live(self) -> int:
        return max((round_.peak_live for round_ in self.rounds), default=0)

    @property
    def rollout_start_s(self) -> float | None:
        return self.rounds[0].start_s if self.rounds else None

    @property
    def rollout_end_s(self) -> float | None:
        """When nothing was left in the engine for the last time."""
        ends = [round_.end_s for round_ in self.rounds if round_.end_s is not None]
        return ends[-1] if ends else None

    def trained_samples(self) -> list[SampleHistory]:
        """In the order of training, without those whose end is not in the log."""
        known = (self.samples.get(sample) for group in self.groups for sample in group)
        return [sample for sample in known if sample is not None and sample.is_finished]

    def ends(self) -> list[SampleHistory]:
        """Samples that finished or were stopped, in that order; first those without a launch."""
        in_rounds = [end for round_ in self.rounds for end in round_.ends]
        known = {end.sample for end in in_rounds}
        ended = (End.FINISHED, End.AT_LIMIT, End.STOPPED)
        others = [s for s in self.samples.values() if s.end in ended and s.sample not in known]
        return others + in_rounds

    def waited_s(self, start_s: float, end_s: float) -> float:
        """Seconds of this time that were waits for pools, and switches. They are known once they
        are over."""
        return sum(
            max(0.0, min(phase.end_s, end_s) - max(phase.start_s, start_s))
            for phase in self.phases
            if phase.name in (POOL_WAIT, POOL_SWITCH)
        )

    def settle(self) -> None:
        """Set the outcome of every sample, which is known when the step is committed."""
        trained = {sample for group in self.groups for sample in group}
        deferred = self.prompts.deferred
        for sample in self.samples.values():
            if sample.sample in trained:
                sample.outcome = Outcome.TRAINED
            elif sample.end is not End.FAILED and sample.sample.prompt in deferred:
                sample.outcome = Outcome.DEFERRED
