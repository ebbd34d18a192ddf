"""Records of one step: its rounds, its phases, its prompts, and its samples with their verdicts."""

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
"""Name of the phase, and of the cause of time, in which a run waits for a pool of devices that
other jobs use too. In the phase `POOL_SWITCH` after that, the run's parked processes wake up."""
_FOR_LOSSES = {*TOO_FEW_RESPONSES.values(), *TOO_FEW_VERDICTS.values()}
"""Reasons for which a prompt is dropped after it has lost too many of its samples."""


class End(StrEnum):
    """How the generation of a sample ended."""

    FINISHED = "finished"
    AT_LIMIT = "finished at the length limit"
    STOPPED = "stopped"
    FAILED = "failed"


class Outcome(StrEnum):
    """What became of a sample in the step in which it was launched."""

    TRAINED = "trained on"
    SURPLUS = "surplus, stopped"
    DEFERRED = "prompt deferred"
    UNUSED = "finished, not used"
    FAILED = "failed"


@dataclass(slots=True)
class Verdict:
    """A reward's answer on one sample. A check that was tried again has several verdicts."""

    event: SampleScored
    time_s: float
    asked_s: float | None
    """Time in seconds at which the check began. None if an earlier process of the run began it."""
    queue_s: float
    """Seconds from the end of the response to the start of the check; 0 for a check tried again."""


class CarriedInto(NamedTuple):
    """Tokens that an earlier launch generated, and that a new launch of the sample begins with."""

    num_tokens: int
    whole: bool
    """Whether the tokens are a complete response, rather than the beginning of one."""
    version: int
    """Version of the weights that generated the tokens, or that last generated them again
    unchanged. If tokens have several versions, the oldest."""


@dataclass(slots=True)
class SampleHistory:
    """One launched sample. If its launch is not in the log, `start_s` is the time of its end."""

    sample: SampleId
    start_s: float
    carried: CarriedInto | None = None
    num_kept: int | None = None
    """Number of carried tokens (of an earlier launch) that newer weights drew again, and that came
    out the same. None if they were not drawn again."""
    most_verified: int | None = None
    """Most carried tokens that the engine verified in passes; those behind were generated, and
    compared. None: all were verified."""
    num_redraws: int = 0
    end_s: float | None = None
    end: End | None = None
    """How the sample's generation ended. None while the sample is being generated."""
    num_tokens: int = 0
    preemptions: int = 0
    verdict: Verdict | None = None
    """The last verdict of the reward on the sample. None if there is no verdict."""
    outcome: Outcome = Outcome.UNUSED
    """What became of the sample. It is final when the step is committed."""

    @property
    def num_taken_up(self) -> int:
        """Number of the sample's tokens that an earlier launch generated, and this one did not."""
        if self.carried is None:
            return self.num_kept or 0
        if self.num_kept is None:
            return min(self.carried.num_tokens, self.num_tokens)
        return (
            self.num_kept if self.most_verified is None else min(self.num_kept, self.most_verified)
        )

    @property
    def has_more_carried(self) -> bool:
        """Whether the sample was stopped when all its tokens had come out the same as carried
        ones, of which there are more: these stay for the next launch."""
        carried, is_same = self.carried, self.num_kept == self.num_tokens and not self.is_finished
        return carried is not None and is_same and 0 < self.num_tokens < carried.num_tokens

    @property
    def num_generated(self) -> int:
        """Number of tokens that this launch generated, without those of an earlier launch."""
        return self.num_tokens - self.num_taken_up

    @property
    def reward(self) -> float | None:
        return None if self.verdict is None else self.verdict.event.value

    @property
    def is_finished(self) -> bool:
        """Whether the sample is a whole response, which the length limit may have cut."""
        return self.end is End.FINISHED or self.end is End.AT_LIMIT


@dataclass(slots=True)
class RoundHistory:
    """One round: samples that are generated together with the same weights."""

    number: int
    kind: RoundKind
    version: int
    """Version of the weights that generate the round's samples."""
    tensor_parallel: int
    samples: tuple[SampleId, ...]
    start_s: float
    slots: int | None
    """Maximum number of samples of all engines together at once. None: not in the log."""
    num_engines: int = 1
    engines: tuple[int, ...] = ()
    """Number of the engine in which each of `samples` began. Empty: all in the first."""
    end_s: float | None = None
    """Time at which the last sample ended or failed. None if a sample has not ended in the log."""
    ends: list[SampleHistory] = field(default_factory=list)
    """Samples in the order in which they finished or were stopped, without those that failed."""
    is_irregular: bool = False
    """Whether a sample of the round failed, was launched twice in it, or changed its engine."""
    peak_live: int = 0
    """Largest number of the round's samples that were being generated at once."""
    told_to_stop_s: float | None = None
    """Time of the last order to stop samples of the round. None: there was none."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of a step's time that is no rollout. Its name is reward_wait, training, sync,
    checkpoint, recovery, pool_wait, switch, or that of a note (a log entry on a span of time:
    evaluation, callbacks, startup). A phase that a note interrupts becomes two."""

    name: str
    start_s: float
    end_s: float


@dataclass(slots=True)
class Turns:
    """Times of a step's training, new weights and commit. None: not in the log."""

    committed_before_s: float | None = None
    """Time of the commit of the step before. None if an earlier process of the run did it."""
    train_on_s: float | None = None
    trained_s: float | None = None
    synced_s: float | None = None
    commit_s: float | None = None
    """Time of the `Commit` command. None if there was no commit, or if the process of the run ended
    in mid-commit and its successor completed it."""


@dataclass(slots=True)
class StepPrompts:
    """Prompts that were fetched, put off to a later round or dropped in a step."""

    fetched: list[PromptId] = field(default_factory=list)
    deferred: set[PromptId] = field(default_factory=set)
    dropped: Counter[str] = field(default_factory=Counter)
    """Number of the step's dropped prompts, by the reason for which they were dropped."""
    dropped_after: dict[str, str] = field(default_factory=dict)
    """For each reason for dropping prompts whose samples failed too often, an example: why a sample
    of the first such prompt failed."""
    long_queue: int = 0
    """Number of prompts that were put off to a later round when the step was committed."""
    _lost: dict[PromptId, str] = field(default_factory=dict)
    """For each prompt, why the last of its samples that were lost (by a failure) was lost."""

    def lose(self, sample: SampleId, reason: str) -> None:
        """Note for which `reason` a sample was lost (its engine, reward or environment failed)."""
        self._lost[sample.prompt] = reason

    def drop(self, command: Drop) -> None:
        """Note that `command` drops a prompt for good, and for which reason."""
        self.dropped[command.reason] += 1
        after = self._lost.get(command.prompt)
        if after is not None and command.reason in _FOR_LOSSES:
            self.dropped_after.setdefault(command.reason, after[:MAX_REASON])


@dataclass(slots=True)
class StepChecks:
    """The checks that began in a step, and the verdicts that came in it. A check that begins in one
    step may end in the next."""

    asked: list[Score] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)


@dataclass(slots=True)
class StepHistory:
    """One optimizer step and its rounds. Its times are in seconds since the run began."""

    start_s: float = 0.0
    """Time at which the step before was committed, or at which the run's process began."""
    step: int = 0
    """The number of the step; 0 until it is committed."""
    end_s: float = 0.0
    checkpointed: bool = False
    session: Session | None = None
    """The session (process of the run) that committed the step, or is working on it."""
    rounds: list[RoundHistory] = field(default_factory=list)
    samples: dict[SampleId, SampleHistory] = field(default_factory=dict)
    """Samples of the step by their ids, in the order of their launches."""
    prompts: StepPrompts = field(default_factory=StepPrompts)
    checks: StepChecks = field(default_factory=StepChecks)
    episodes: StepEpisodes = field(default_factory=StepEpisodes)
    streamed: list[tuple[SampleId, ...]] = field(default_factory=list)
    """Groups (samples of one prompt) whose gradients were begun while the round went on."""
    train_on: TrainOn | None = None
    trainer: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the optimizer step, by name."""
    turns: Turns = field(default_factory=Turns)
    phases: list[Phase] = field(default_factory=list)
    """Phases of the step, in the order in which they ended."""
    notes: list[Note] = field(default_factory=list)

    @property
    def kind(self) -> RoundKind | None:
        """The kind of the step's first round; further rounds, which the step needs if prompts fall
        short, may be of other kinds. None: no round was launched."""
        return self.rounds[0].kind if self.rounds else None

    @property
    def version(self) -> int:
        return self.rounds[-1].version if self.rounds else 0

    @property
    def groups(self) -> Sequence[tuple[SampleId, ...]]:
        """The groups (of samples of one prompt) that the step was trained on. Empty before that."""
        return () if self.train_on is None else self.train_on.groups

    @property
    def num_launched(self) -> int:
        """Number of samples that were launched in the step."""
        return sum(len(round_.samples) for round_ in self.rounds)

    @property
    def num_streamed(self) -> int:
        """Number of samples whose gradients were begun while the round went on."""
        return sum(map(len, self.streamed))

    @property
    def peak_live(self) -> int:
        return max((round_.peak_live for round_ in self.rounds), default=0)

    @property
    def rollout_start_s(self) -> float | None:
        return self.rounds[0].start_s if self.rounds else None

    @property
    def rollout_end_s(self) -> float | None:
        """Time of the end of the last round that has ended. None: no round has ended."""
        ends = [round_.end_s for round_ in self.rounds if round_.end_s is not None]
        return ends[-1] if ends else None

    def trained_samples(self) -> list[SampleHistory]:
        """Samples that the step was trained on, in order, without those whose end is not in the
        log."""
        known = (self.samples.get(sample) for group in self.groups for sample in group)
        return [sample for sample in known if sample is not None and sample.is_finished]

    def ends(self) -> list[SampleHistory]:
        """Samples that finished or were stopped, in the order of their ends. Samples that are in no
        round, since the log lacks their launch, come first."""
        in_rounds = [end for round_ in self.rounds for end in round_.ends]
        known = {end.sample for end in in_rounds}
        ended = (End.FINISHED, End.AT_LIMIT, End.STOPPED)
        others = [s for s in self.samples.values() if s.end in ended and s.sample not in known]
        return others + in_rounds

    def waited_s(self, start_s: float, end_s: float) -> float:
        """Seconds between the times `start_s` and `end_s` that went to waits for device pools and
        to switches to them. A wait that has not ended yet does not count."""
        return sum(
            max(0.0, min(phase.end_s, end_s) - max(phase.start_s, start_s))
            for phase in self.phases
            if phase.name in (POOL_WAIT, POOL_SWITCH)
        )

    def settle(self) -> None:
        """Set what became of each sample (trained, put off, unused, ...), at the commit."""
        trained = {sample for group in self.groups for sample in group}
        deferred = self.prompts.deferred
        for sample in self.samples.values():
            if sample.sample in trained:
                sample.outcome = Outcome.TRAINED
            elif sample.end is not End.FAILED and sample.sample.prompt in deferred:
                sample.outcome = Outcome.DEFERRED
