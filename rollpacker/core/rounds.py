"""Tail batching: one round of generation, from launch to the groups that will be trained on.

A short round launches more prompts and more samples per prompt than the step needs. A prompt is
done when `samples_per_prompt` of its samples are done; the rest of it is aborted at once. When
enough prompts are done, everything left is aborted and the unfinished prompts are deferred. A long
round, or one with tail batching off, launches what it needs and waits for all. Both are the same
machine with other numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rollpacker.core.commands import Abort, Command, Defer, Drop, Launch, RoundKind, Score
from rollpacker.core.events import SampleAborted, SampleFailed, SampleGenerated, SampleScored
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.lifecycle import SampleState, check

Race = Literal["generated", "scored"]

TOO_FEW_VERDICTS = "fewer than two verdicts"
TOO_FEW_RESPONSES = "fewer than two responses"


class StrayEventError(AssertionError):
    """An event about a sample that was never launched, or made by weights that it must not be made
    by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TailBatchingConfig:
    """Over-start, keep the first to finish, gather the stragglers (`tail_batching.*`)."""

    enabled: bool = True
    prompt_factor: float = 1.25
    """eta_p: a short round launches ceil(prompt_factor * P0) prompts."""
    sample_factor: float = 1.25
    """eta_r: ... with ceil(sample_factor * R0) samples each."""
    race: Race = "generated"
    """What counts as finishing first. "scored" is what the published code does: a slow reward can
    then push a prompt into a long round, and runs are no longer repeatable bit by bit."""
    flush_each_epoch: bool = True
    """Empty the long queue at the end of every epoch, not only at the end of the run."""

    def __post_init__(self) -> None:
        for name in ("prompt_factor", "sample_factor"):
            value = getattr(self, name)
            if not (math.isfinite(value) and 1 <= value <= 16):
                raise ValueError(f"{name} must lie between 1 and 16, not {value}")

    def num_prompts(self, prompts_per_step: int) -> int:
        """Prompts that a short round launches."""
        return _ceil(self.prompt_factor * prompts_per_step) if self.enabled else prompts_per_step

    def num_samples(self, samples_per_prompt: int) -> int:
        """Samples per prompt that a short round launches."""
        return (
            _ceil(self.sample_factor * samples_per_prompt) if self.enabled else samples_per_prompt
        )


def _ceil(value: float) -> int:
    """Rounded up, but 1.1 * 10 is 11 and not 12."""
    return math.ceil(value - 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """What a round is to do."""

    number: int
    kind: RoundKind
    version: int
    prompts: tuple[tuple[PromptId, int], ...]
    """Prompts and the attempt that this launch is of each."""
    num_samples: int
    """Launched per prompt."""
    samples_needed: int
    """R0: kept per prompt."""
    prompts_needed: int
    """The round is over when so many prompts are done."""
    race: Race = "generated"
    max_retries: int = 2
    """Replacements launched per prompt for samples that the engine failed on."""


@dataclass(slots=True)
class _Group:
    """The samples of one prompt in this round."""

    prompt: PromptId
    attempt: int
    samples: dict[SampleId, SampleState] = field(default_factory=dict)
    """In index order."""
    finished: list[SampleId] = field(default_factory=list)
    """Those that count in the race, first come first; never more than needed."""
    values: dict[SampleId, float | None] = field(default_factory=dict)
    """Verdicts."""
    num_generating: int = 0
    num_unscored: int = 0
    """Generated, verdict awaited."""
    num_retries: int = 0
    done: bool = False
    deferred: bool = False


class Round:
    """One round. Feed it events of its samples; it answers with commands until `closed`."""

    def __init__(self, plan: RoundPlan) -> None:
        self.plan = plan
        self.num_late = 0
        """Events that came after their sample no longer mattered; normal, and counted."""
        self._groups = {prompt: _Group(prompt, attempt) for prompt, attempt in plan.prompts}
        assert len(self._groups) == len(plan.prompts), "a prompt is twice in one round"
        assert 1 <= plan.prompts_needed <= len(plan.prompts)
        assert plan.samples_needed <= plan.num_samples
        self._num_done = 0
        self._in_engine: dict[SampleId, None] = {}
        """Launched, and neither generated, failed nor let go of by the engine."""
        self._unscored: dict[SampleId, None] = {}
        """Handed to the reward, no verdict yet."""
        self._num_awaited = 0
        """Of those, the ones that still matter."""
        self._race_over = False

    # -- what the job asks -------------------------------------------------------------

    def launch(self) -> list[Command]:
        samples: list[SampleId] = []
        for group in self._groups.values():
            samples += self._add_samples(group, self.plan.num_samples)
        return [self._launch(samples)]

    @property
    def closed(self) -> bool:
        """The race is over, the engine holds nothing of this round, and what is kept has its
        verdicts."""
        return self._race_over and not self._in_engine and not self._num_awaited

    def close(self) -> tuple[tuple[tuple[SampleId, ...], ...], list[Drop]]:
        """The groups to train on, in launch order with samples in index order, and the prompts to
        drop."""
        assert self.closed
        groups: list[tuple[SampleId, ...]] = []
        drops: list[Drop] = []
        for group in self._groups.values():
            if group.deferred:
                continue
            kept = sorted(s for s in group.finished if group.values.get(s) is not None)
            if len(kept) >= 2:
                groups.append(tuple(kept))
            else:
                enough = len(group.finished) >= 2
                reason = TOO_FEW_VERDICTS if enough else TOO_FEW_RESPONSES
                drops.append(Drop(prompt=group.prompt, reason=reason))
                kept = []
            self._settle(group, set(kept))
        return tuple(groups), drops

    def unanswered(self) -> list[SampleId]:
        """Samples whose verdict is still under way although nobody waits for it."""
        return list(self._unscored)

    def deferred(self) -> list[tuple[PromptId, int]]:
        """Deferred prompts, in launch order, with the attempt that comes next."""
        return [(g.prompt, g.attempt + 1) for g in self._groups.values() if g.deferred]

    @property
    def generating(self) -> bool:
        """The engine still has samples of this round."""
        return bool(self._in_engine)

    def waiting_for(self) -> str:
        """In words, for a deadline's message."""
        if self.generating:
            return f"{_listed(self._in_engine, 'response')} from the engine"
        return f"{_listed(self._awaited_verdicts(), 'verdict')} from the rewards"

    # -- events ------------------------------------------------------------------------

    def on_generated(self, event: SampleGenerated) -> list[Command]:
        group = self._group_of(event.sample)
        if not self._leave_engine(event.sample):
            return []
        group.num_generating -= 1
        if event.version != self.plan.version:
            raise StrayEventError(
                f"{event.sample} was sampled from version {event.version} in a round "
                f"of version {self.plan.version}"
            )
        self._move(group, event.sample, SampleState.GENERATED)
        self._unscored[event.sample] = None
        group.num_unscored += 1
        self._num_awaited += 1
        commands: list[Command] = [Score(sample=event.sample)]
        if self.plan.race == "generated":
            group.finished.append(event.sample)
            return commands + self._after_progress(group)
        return commands

    def on_scored(self, event: SampleScored) -> list[Command]:
        sample = event.sample
        group = self._group_of(sample)
        if sample not in self._unscored:
            raise StrayEventError(f"a verdict on {sample}, which was not handed to the reward")
        del self._unscored[sample]
        if group.samples[sample] is not SampleState.GENERATED:
            self.num_late += 1
            return []
        self._move(group, sample, SampleState.SCORED)
        self._forget_verdict(group)
        group.values[sample] = event.value
        if self.plan.race == "scored" and not group.done:
            if event.value is not None:
                group.finished.append(sample)
            return self._after_progress(group)
        return []

    def on_aborted(self, event: SampleAborted) -> list[Command]:
        group = self._group_of(event.sample)
        state = group.samples[event.sample]
        if state is SampleState.LAUNCHED:
            raise StrayEventError(f"the engine let go of {event.sample}, which nobody aborted")
        if event.sample not in self._in_engine:
            raise StrayEventError(f"the engine let go of {event.sample} twice")
        del self._in_engine[event.sample]
        return []

    def on_failed(self, event: SampleFailed) -> list[Command]:
        group = self._group_of(event.sample)
        if not self._leave_engine(event.sample):
            return []
        group.num_generating -= 1
        self._move(group, event.sample, SampleState.FAILED)
        hopeful = len(group.finished) + group.num_generating
        if self.plan.race == "scored":
            hopeful += group.num_unscored
        if hopeful < self.plan.samples_needed and group.num_retries < self.plan.max_retries:
            group.num_retries += 1
            return [self._launch(self._add_samples(group, 1))]
        return self._after_progress(group)

    # -- the race ----------------------------------------------------------------------

    def _after_progress(self, group: _Group) -> list[Command]:
        """A sample of an unfinished group ended: is the group done, is the round over?"""
        assert not group.done and not group.deferred
        complete = len(group.finished) == self.plan.samples_needed
        may_still_grow = group.num_generating or (self.plan.race == "scored" and group.num_unscored)
        if not complete and may_still_grow:
            return []
        return self._finish_group(group)

    def _finish_group(self, group: _Group) -> list[Command]:
        group.done = True
        self._num_done += 1
        commands = self._let_go(group, SampleState.ABORTED)
        if self._num_done == self.plan.prompts_needed:
            commands += self._end_race()
        return commands

    def _end_race(self) -> list[Command]:
        self._race_over = True
        aborted: list[SampleId] = []
        deferred: list[PromptId] = []
        for group in self._groups.values():
            if group.done:
                continue
            group.deferred = True
            deferred.append(group.prompt)
            for abort in self._let_go(group, SampleState.DEFERRED):
                assert isinstance(abort, Abort)
                aborted += abort.samples
        commands: list[Command] = []
        if aborted:
            commands.append(Abort(samples=tuple(aborted)))
        if deferred:
            commands.append(Defer(prompts=tuple(deferred)))
        return commands

    def _let_go(self, group: _Group, state: SampleState) -> list[Command]:
        """Everything of the group that is not kept moves to `state`; what still runs is aborted."""
        kept = set(group.finished) if group.done else set()
        running: list[SampleId] = []
        for sample, now in group.samples.items():
            if sample in kept or now is SampleState.FAILED:
                continue
            if now is SampleState.LAUNCHED:
                running.append(sample)
            if now is SampleState.SCORED and group.done:
                continue  # scored without a verdict: settled when the round closes
            if now is SampleState.GENERATED:
                self._forget_verdict(group)
            self._move(group, sample, state)
        group.num_generating = 0
        return [Abort(samples=tuple(running))] if running else []

    # -- bookkeeping -------------------------------------------------------------------

    def _add_samples(self, group: _Group, count: int) -> list[SampleId]:
        start = len(group.samples)
        samples = [SampleId(group.prompt, start + i, group.attempt) for i in range(count)]
        for sample in samples:
            group.samples[sample] = check(SampleState.PLANNED, SampleState.LAUNCHED)
            self._in_engine[sample] = None
        group.num_generating += count
        return samples

    def _launch(self, samples: Sequence[SampleId]) -> Launch:
        plan = self.plan
        return Launch(
            round=plan.number, kind=plan.kind, samples=tuple(samples), version=plan.version
        )

    def _leave_engine(self, sample: SampleId) -> bool:
        """The engine is done with the sample. False if it was aborted meanwhile: a late event."""
        if sample not in self._in_engine:
            raise StrayEventError(f"{sample} ended twice")
        del self._in_engine[sample]
        if self._groups[sample.prompt].samples[sample] is SampleState.LAUNCHED:
            return True
        self.num_late += 1
        return False

    def _group_of(self, sample: SampleId) -> _Group:
        group = self._groups.get(sample.prompt)
        if group is None or sample not in group.samples:
            raise StrayEventError(f"{sample} was not launched in round {self.plan.number}")
        return group

    def _forget_verdict(self, group: _Group) -> None:
        """One verdict fewer to wait for: it came, or it does not matter any more."""
        group.num_unscored -= 1
        self._num_awaited -= 1

    def _move(self, group: _Group, sample: SampleId, state: SampleState) -> None:
        group.samples[sample] = check(group.samples[sample], state)

    def _awaited_verdicts(self) -> list[SampleId]:
        return [
            sample
            for sample in self._unscored
            if self._groups[sample.prompt].samples[sample] is SampleState.GENERATED
        ]

    def _settle(self, group: _Group, kept: set[SampleId]) -> None:
        for sample, state in group.samples.items():
            if sample in kept:
                self._move(group, sample, SampleState.TRAINED)
            elif state in (SampleState.SCORED, SampleState.GENERATED):
                self._move(group, sample, SampleState.DROPPED)


def _listed(samples: Iterable[SampleId], noun: str) -> str:
    samples = list(samples)
    names = ", ".join(str(sample) for sample in samples[:3])
    more = f" and {len(samples) - 3} more" if len(samples) > 3 else ""
    return f"{len(samples)} {noun}{'' if len(samples) == 1 else 's'} ({names}{more})"
