"""Tail batching, one round at a time.

A short round launches more prompts and more samples per prompt than the step needs and keeps the
first to finish. When a prompt has enough finished samples, its surplus is aborted at once. When
enough prompts are done, everything left is aborted and the unfinished prompts are deferred. A long
round, or one with tail batching off, launches what it needs and waits for all. All are the same
machine with other numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from rollpacker.core.checks.reward_schedule import RewardSchedule, RewardScheduleConfig
from rollpacker.core.commands import Abort, Command, Defer, Drop, Launch
from rollpacker.core.events import SampleAborted, SampleFailed, SampleGenerated, SampleScored
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.lifecycle import SampleState, check
from rollpacker.core.rounds.groups import UNDER_WAY, Group, Quota, RoundPlan, Waiting, share_out

TOO_FEW_VERDICTS = {1: "no verdict", 2: "fewer than two verdicts"}
TOO_FEW_RESPONSES = {1: "no response", 2: "fewer than two responses"}
"""Why a prompt is dropped, by the number that a group needs."""


class StrayEventError(AssertionError):
    """An event about a sample that was never launched, or made by weights that it must not be made
    by."""


LAUNCHED, ACTING = SampleState.LAUNCHED, SampleState.ACTING
GENERATED = SampleState.GENERATED
# The two transitions that every sample makes are looked up in the table once.
_GENERATED_NOW = check(LAUNCHED, GENERATED)
_SCORED_NOW = check(GENERATED, SampleState.SCORED)


class Round:
    """One round. Feed it events of its samples; it answers with commands until `closed`."""

    def __init__(
        self,
        plan: RoundPlan,
        rewards: RewardSchedule | None = None,
        late: Counter[str] | None = None,
    ) -> None:
        """`late` counts, by event name, what came after its sample no longer mattered: normal."""
        self.plan = plan
        self.preemptions = 0
        self.num_launched = 0
        self.longest_tokens = 0
        """Most tokens that this round generated of one response that the engine let go of."""
        self._rewards = RewardSchedule(RewardScheduleConfig()) if rewards is None else rewards
        self._overlap = self._rewards.config.overlap
        self._late = Counter[str]() if late is None else late
        self._groups = {one.prompt: Group(one, plan.tail.awaited_after) for one in plan.prompts}
        assert len(self._groups) == len(plan.prompts), "a prompt is twice in one round"
        assert 1 <= plan.prompts_needed <= len(plan.prompts)
        assert plan.samples_needed <= plan.num_samples
        assert self._overlap or plan.race == "generated", "no race on verdicts without overlap"
        self._num_open_quotas = share_out(plan, self._groups.values())
        self.num_under_way = 0
        """Launched, and neither generated, failed nor let go of: in the engine, or acting."""
        self._version = plan.version
        self._needed = plan.samples_needed
        self._scored_race = plan.race == "scored"
        self._num_awaited = 0
        """Verdicts that still matter."""
        self._unasked: list[tuple[Group, int]] = []
        """Without overlap: generated, and not handed to the reward yet."""
        self._complete: list[Group] = []
        """Done, every verdict there."""

    # -- what the job asks -------------------------------------------------------------

    def launch(self) -> list[Command]:
        samples: list[SampleId] = []
        # Where slots are few, those with the most behind them are expected to take longest.
        for group in sorted(self._groups.values(), key=Group.most_carried, reverse=True):
            samples += self._add_samples(group, self.plan.num_samples)
        launch = self._launch(samples)
        ends = [
            command
            for quota in {id(g.quota): g.quota for g in self._groups.values()}.values()
            if not quota.num_missing  # a source with too few prompts for a place of its own
            for command in self._end_race(quota)
        ]
        return [*launch, *ends]

    @property
    def closed(self) -> bool:
        """The race is over, the engine holds nothing of this round, and what is kept has its
        verdicts."""
        return not (self._num_open_quotas or self.num_under_way or self._num_awaited)

    def close(self) -> tuple[tuple[tuple[SampleId, ...], ...], list[Drop]]:
        """The groups to train on, in launch order with samples in index order, and the prompts to
        drop."""
        assert self.closed
        groups: list[tuple[SampleId, ...]] = []
        drops: list[Drop] = []
        needed = self.plan.min_verdicts
        for group in self._groups.values():
            group.quota.groups = []  # no cycles: a round is freed as soon as it is over
            if group.deferred:
                continue
            kept = group.kept()
            if len(kept) >= needed:
                groups.append(tuple([group.samples[index] for index in kept]))
            else:
                enough = len(group.finished) >= needed
                reasons = TOO_FEW_VERDICTS if enough else TOO_FEW_RESPONSES
                drops.append(Drop(prompt=group.prompt, reason=reasons[needed]))
                kept = []
            group.settle(kept)
        return tuple(groups), drops

    def deferred(self) -> list[Waiting]:
        """Deferred prompts, in launch order, as they wait for their next launch."""
        carries = self.plan.tail.carries
        return [
            Waiting(g.prompt, g.attempt + 1, g.to_carry() if carries else ())
            for g in self._groups.values()
            if g.deferred
        ]

    @property
    def has_complete(self) -> bool:
        """Whether `take_complete` has groups to look at."""
        return bool(self._complete)

    def take_complete(self) -> list[tuple[SampleId, ...]]:
        """Groups certain to be trained on whose verdicts are all there, not asked for before."""
        groups = []
        for group in self._complete:
            kept = group.kept()
            if len(kept) >= self.plan.min_verdicts and not group.streamed:
                group.streamed = True
                groups.append(tuple([group.samples[index] for index in kept]))
        self._complete = []
        return groups

    def has_signal(self, group: tuple[SampleId, ...]) -> bool:
        """Whether the verdicts on these samples of one prompt differ."""
        values = self._groups[group[0].prompt].values
        return len({values[sample.index] for sample in group}) > 1

    def length_of(self, sample: SampleId) -> int:
        """Tokens with which the engine let go of the sample."""
        return self._groups[sample.prompt].lengths[sample.index]

    def lengths(self) -> list[tuple[PromptId, list[int], list[int]]]:
        """For every prompt, the lengths of its complete responses and the tokens that stopped ones
        had reached."""
        complement = self.plan.tail.complements
        groups = self._groups.values()
        return [(group.prompt, *group.observed(complement=complement)) for group in groups]

    def tokens(self) -> int:
        """Tokens generated in this round, those of stopped samples included."""
        return sum(
            group.new_tokens(index)
            for group in self._groups.values()
            for index in range(len(group.samples))
        )

    def waiting_for(self) -> str:
        """In words, for a deadline's message."""
        if self.num_under_way:
            samples = self._with(lambda group, index: group.lengths[index] == UNDER_WAY)
            return f"{listed(samples, 'response')} from the engine"
        samples = self._with(lambda group, index: group.states[index] is SampleState.GENERATED)
        return f"{listed(samples, 'verdict')} from the rewards"

    # -- events ------------------------------------------------------------------------

    def on_generated(self, event: SampleGenerated) -> list[Command]:
        group, index = self._leave_engine(event.sample, event.num_tokens, event.num_kept)
        group.whole[index] = True
        self.preemptions += event.preemptions
        if group.states[index] is not LAUNCHED:
            self._late["SampleGenerated"] += 1
            return self._after_engine()
        if event.version != self._version:
            raise self._wrong_version(event)
        group.states[index] = _GENERATED_NOW
        return self._generated(group, index, event.num_tokens)

    def _generated(self, group: Group, index: int, num_tokens: int) -> list[Command]:
        """The sample, which is complete, counts."""
        group.num_generating -= 1
        group.num_unscored += 1
        self._num_awaited += 1
        if self._overlap:
            commands = self._rewards.ask(group.samples[index], num_tokens)
        else:
            commands = []
            self._unasked.append((group, index))
        if not self._scored_race:
            finished = group.finished
            finished.append(index)
            if len(finished) == self._needed or not group.num_generating:
                commands += self._finish_group(group)
        if not self.num_under_way and self._unasked:
            commands += self._after_engine()
        return commands

    def on_scored(self, event: SampleScored) -> list[Command]:
        """A verdict; one on a sample of an earlier round is late like any other."""
        sample = event.sample
        index = sample.index
        group = self._groups.get(sample.prompt)
        if (
            group is None
            or sample.attempt != group.attempt
            or index >= len(group.states)
            or group.states[index] is not GENERATED
        ):
            self._late["SampleScored"] += 1
            return []
        group.states[index] = _SCORED_NOW
        group.values[index] = event.value
        group.num_unscored -= 1
        self._num_awaited -= 1
        if group.done:
            if not group.num_unscored:
                self._complete.append(group)
        elif self._scored_race:
            if event.value is not None:
                group.finished.append(index)
            return self._after_progress(group)
        return []

    def on_aborted(self, event: SampleAborted) -> list[Command]:
        group, index = self._group_of(event.sample)
        if group.states[index] is SampleState.LAUNCHED:
            raise StrayEventError(f"the engine let go of {event.sample}, which nobody aborted")
        self._leave_engine(event.sample, event.num_tokens, event.num_kept)
        # Cut off before it was looked at, a complete response is as complete as it was.
        group.whole[index] = event.num_kept is None and group.carried_at(index).whole
        self.preemptions += event.preemptions
        return self._after_engine()

    def on_failed(self, event: SampleFailed) -> list[Command]:
        group, index = self._leave_engine(event.sample, 0, 0)
        if group.states[index] is not SampleState.LAUNCHED:
            self._late["SampleFailed"] += 1
            return self._after_engine()
        return self._failed(group, index)

    def _failed(
        self, group: Group, index: int, *, is_chance: bool = True, of_place: bool = False
    ) -> list[Command]:
        """The sample, which nobody has any more, is not to be had. `is_chance`: it could be, by
        another try; else its replacement has noise of its own. `of_place`: see `take_retry`."""
        group.num_generating -= 1
        group.states[index] = check(group.states[index], SampleState.FAILED)
        hopeful = len(group.finished) + group.num_generating
        if self._scored_race:
            hopeful += group.num_unscored
        most = self.plan.max_retries
        if hopeful < self.plan.samples_needed and group.take_retry(index, most, of_place=of_place):
            replacement = self._add_samples(group, 1)
            if not is_chance:
                return self._launch(replacement)
            group.places[-1] = group.places[index]
            keeps_noise = self.plan.tail.selection == "none"
            replaced = (group.samples[index],) if keeps_noise else ()
            return self._launch(replacement, replaces=replaced)
        return self._after_progress(group) + self._after_engine()

    def awaits(self, sample: SampleId) -> bool:
        """Whether a verdict on the sample still matters."""
        index = sample.index
        group = self._groups.get(sample.prompt)
        if group is None or sample.attempt != group.attempt or index >= len(group.states):
            return False
        return group.states[index] is GENERATED

    def missing(self, prompt: PromptId) -> int:
        """Places of the prompt that are still to be filled."""
        return self._needed - len(self._groups[prompt].finished)

    # -- the race ----------------------------------------------------------------------

    def _after_progress(self, group: Group) -> list[Command]:
        """A sample of an unfinished group ended: is the group done, is the race over?"""
        if len(group.finished) != self._needed and (
            group.num_generating or (self._scored_race and group.num_unscored)
        ):
            return []
        assert not group.done and not group.deferred
        return self._finish_group(group)

    def _finish_group(self, group: Group) -> list[Command]:
        quota = group.quota
        if not quota.take_place(group):
            return []  # complete, but every place left is kept for a prompt that is awaited
        group.done = True
        commands = self._stop(*self._let_go(group, SampleState.ABORTED))
        if not group.num_unscored:
            self._complete.append(group)
        if not quota.num_missing:
            self._num_open_quotas -= 1
            commands += self._end_race(quota)
        return commands

    def _end_race(self, quota: Quota) -> list[Command]:
        running: list[SampleId] = []
        unneeded: list[SampleId] = []
        deferred: list[PromptId] = []
        for group in quota.groups:
            if not group.done:
                group.deferred = True
                deferred.append(group.prompt)
                of_engine, of_rewards = self._let_go(group, SampleState.DEFERRED)
                running += of_engine
                unneeded += of_rewards
        commands = self._stop(running, unneeded)
        if deferred:
            commands.append(Defer(prompts=tuple(deferred)))
        return commands

    def _stop(self, running: list[SampleId], unneeded: list[SampleId]) -> list[Command]:
        """Abort responses under way, drop verdicts that are not needed any more."""
        commands: list[Command] = [Abort(samples=tuple(running))] if running else []
        if unneeded and self._overlap:
            commands += self._rewards.drop(unneeded)
        return commands

    def _let_go(self, group: Group, state: SampleState) -> tuple[list[SampleId], list[SampleId]]:
        """Everything of the group that is not kept moves to `state`. Those that the engine still
        runs, and those whose verdicts were awaited."""
        kept = group.finished if group.done else ()
        running: list[SampleId] = []
        unneeded: list[SampleId] = []
        states = group.states
        for index, now in enumerate(states):
            if now is SampleState.FAILED or index in kept:
                continue
            if now is LAUNCHED or now is ACTING:
                running.append(group.samples[index])
            elif now is SampleState.GENERATED:
                group.num_unscored -= 1
                self._num_awaited -= 1
                unneeded.append(group.samples[index])
            elif group.done:
                continue  # scored without a verdict: settled when the round closes
            states[index] = check(now, state)
        group.num_generating = 0
        return running, unneeded

    def _after_engine(self) -> list[Command]:
        """The engine let go of a sample: without overlap, the last one starts the checks."""
        if self.num_under_way or not self._unasked:
            return []
        unasked, self._unasked = self._unasked, []
        commands: list[Command] = []
        for group, index in unasked:
            if group.states[index] is SampleState.GENERATED:
                commands += self._rewards.ask(group.samples[index], group.lengths[index])
        return commands

    # -- bookkeeping -------------------------------------------------------------------

    def _add_samples(self, group: Group, count: int) -> list[SampleId]:
        samples = group.add(count, check(SampleState.PLANNED, self._begin_as()))
        self.num_under_way += count
        self.num_launched += count
        return samples

    def _begin_as(self) -> SampleState:
        return LAUNCHED

    def _launch(
        self, samples: list[SampleId], replaces: tuple[SampleId, ...] = ()
    ) -> list[Command]:
        plan = self.plan
        carried: list[int] = []
        for sample in samples:
            group = self._groups[sample.prompt]
            carried.append(group.carried_at(sample.index).tokens if group.carried else 0)
        launch = Launch(
            round=plan.number,
            kind=plan.kind,
            samples=tuple(samples),
            version=plan.version,
            tensor_parallel=plan.tensor_parallel,
            speculate=plan.speculate,
            carried=tuple(carried) if any(carried) else (),
            replaces=replaces,
        )
        return [launch]

    def _leave_engine(
        self, sample: SampleId, num_tokens: int, num_kept: int | None
    ) -> tuple[Group, int]:
        """The engine is done with the sample."""
        group, index = self._groups.get(sample.prompt), sample.index
        if group is None or sample.attempt != group.attempt or not 0 <= index < len(group.lengths):
            raise self._stray(sample)
        if group.lengths[index] != UNDER_WAY:
            raise StrayEventError(f"{sample} ended twice")
        group.lengths[index] = num_tokens
        group.kept_tokens[index] = num_kept
        if num_tokens > self.longest_tokens:  # what was carried can only make it fewer
            self.longest_tokens = max(self.longest_tokens, group.new_tokens(index))
        self.num_under_way -= 1
        return group, index

    def _group_of(self, sample: SampleId) -> tuple[Group, int]:
        index = sample.index
        group = self._groups.get(sample.prompt)
        if group is None or sample.attempt != group.attempt or not 0 <= index < len(group.samples):
            raise self._stray(sample)
        return group, index

    def _wrong_version(self, event: SampleGenerated) -> StrayEventError:
        return StrayEventError(
            f"{event.sample} was sampled from version {event.version} in a round "
            f"of version {self._version}"
        )

    def _stray(self, sample: SampleId) -> StrayEventError:
        return StrayEventError(f"{sample} was not launched in round {self.plan.number}")

    def _with(self, applies: Callable[[Group, int], bool]) -> list[SampleId]:
        return [
            sample
            for group in self._groups.values()
            for index, sample in enumerate(group.samples)
            if applies(group, index)
        ]


def listed(samples: Iterable[SampleId], noun: str) -> str:
    """So many of what the noun says, and the first of them, in words."""
    samples = list(samples)
    names = ", ".join(str(sample) for sample in samples[:3])
    more = f" and {len(samples) - 3} more" if len(samples) > 3 else ""
    return f"{len(samples)} {noun}{'' if len(samples) == 1 else 's'} ({names}{more})"
