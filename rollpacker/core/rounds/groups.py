"""Plan of a round, and the groups that race in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from rollpacker.core.commands import RoundKind
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.lifecycle import SampleState, check
from rollpacker.core.rounds.tail_batching import Race, TailBatchingConfig

UNDER_WAY = -1
"""Stands in place of a length while the engine or an environment has the sample."""


class CarriedLength(NamedTuple):
    """Number of tokens that an earlier launch of the prompt left of one response."""

    tokens: int
    whole: bool
    """True if the response is complete."""

    def under(self, cut_off_at: int | None) -> CarriedLength:
        """This length, marked as not complete if the response was cut off at `cut_off_at` tokens,
        which is below the cap of today. None: the cap has not grown."""
        is_over = cut_off_at is not None and self.tokens >= cut_off_at
        return CarriedLength(self.tokens, whole=False) if is_over else self


NOTHING_CARRIED = CarriedLength(0, False)


_TRAINED_NOW = check(SampleState.SCORED, SampleState.TRAINED)


class Waiting(NamedTuple):
    """A prompt that waits for a round."""

    prompt: PromptId
    attempt: int = 0
    """Number of the prompt's next launch, from 0: how often it was deferred."""
    carried: tuple[CarriedLength, ...] = ()
    """Tokens that earlier launches left of each response, by the response's index; may be empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """Plan of a round: the prompts that it launches, and when it is over."""

    number: int
    kind: RoundKind
    version: int
    prompts: tuple[Waiting, ...]
    num_samples: int
    """Number of samples launched per prompt."""
    samples_needed: int
    """R0: number of samples kept per prompt."""
    prompts_needed: int
    """Number of finished prompts at which the round is over."""
    race: Race = "generated"
    tail: TailBatchingConfig
    max_retries: int = 2
    """Most replacements launched per prompt for samples that the engine failed on, or whose
    environment raised or was too slow; for those whose environment's process was lost, the most per
    failed sample."""
    tensor_parallel: int = 1
    speculate: bool = False
    min_verdicts: int = 2
    """Fewest verdicts with which a group is trained on, rather than dropped: 2 where samples are
    compared with each other, else 1."""
    defers_to: int = 0
    """Number of the queue that unfinished prompts join; see `NextRound.defers_to`."""


class Quota:
    """Prompts that race for the same places among a step's groups, such as those of one source."""

    __slots__ = ("groups", "num_awaited", "num_missing")

    def __init__(self, num_missing: int) -> None:
        self.num_missing = num_missing
        self.num_awaited = 0
        """Number of places kept for prompts that the round waits for and that are not done yet."""
        self.groups: list[Group] = []

    def join(self, group: Group) -> None:
        """Add the group to this race. The round waits for the group only as far as there are
        places."""
        group.quota = self
        self.groups.append(group)
        group.awaited = group.awaited and self.num_awaited < self.num_missing
        self.num_awaited += group.awaited

    def take_place(self, group: Group) -> bool:
        """Give a complete group a place, if one is left besides those kept for others. Returns
        whether it has one."""
        if group.awaited:
            self.num_awaited -= 1
        elif self.num_missing <= self.num_awaited:
            return False
        self.num_missing -= 1
        return True


# A list per fact of a sample, since rounds have thousands of them and every event reads some.
class Group:
    """The samples of one prompt in this round. Lists are by sample index."""

    __slots__ = (
        *("attempt", "awaited", "carried", "deferred", "done", "finished", "kept_tokens"),
        *("lengths", "num_generating", "num_retries", "num_unscored", "places", "prompt", "quota"),
        *("samples", "states", "streamed", "values", "whole"),
    )

    def __init__(self, waiting: Waiting, awaited_after: int | None) -> None:
        self.prompt, self.attempt, self.carried = waiting
        self.awaited = awaited_after is not None and self.attempt >= awaited_after
        """True if the round does not end before this group is done."""
        self.quota: Quota
        self.places: list[int] = []
        """Number that decides each sample's noise and carried-over tokens: its own index, or the
        number of the failed sample that it replaces."""
        self.kept_tokens: list[int | None] = []
        """Number of carried-over tokens that came out the same, per sample. None: not compared."""
        self.samples: list[SampleId] = []
        self.states: list[SampleState] = []
        self.lengths: list[int] = []
        """Number of tokens that each sample had when it left the engine; `UNDER_WAY` before."""
        self.whole: list[bool] = []
        """Whether each response is complete, rather than stopped on its way."""
        self.values: list[float | None] = []
        """Reward of each sample. None while it is not judged, and where judging failed."""
        self.finished: list[int] = []
        """Indices of the samples that count in the race, in the order in which they finished, never
        more than the group needs."""
        self.num_generating = 0
        self.num_unscored = 0
        """Number of samples that are generated and wait for their verdicts."""
        self.num_retries = 0
        self.done = False
        self.deferred = False
        self.streamed = False

    def add(self, count: int, state: SampleState) -> list[SampleId]:
        """Add so many samples in this state, each in a place of its own, and return their ids."""
        start = len(self.samples)
        samples = [SampleId(self.prompt, start + i, self.attempt) for i in range(count)]
        self.samples += samples
        self.states += [state] * count
        self.places += range(start, start + count)
        self.lengths += [UNDER_WAY] * count
        self.kept_tokens += [None] * count
        self.whole += [False] * count
        self.values += [None] * count
        self.num_generating += count
        return samples

    def take_retry(self, index: int, most: int, *, of_place: bool) -> bool:
        """Whether this failed sample may be replaced. Without `of_place`, the prompt has `most`
        replacements, and this one is counted. With `of_place`, where something failed that several
        prompts share, each sample's place has `most` replacements, and the prompt's are not
        touched."""
        if of_place:
            failed = [n for n, state in enumerate(self.states) if state is SampleState.FAILED]
            return sum(self.places[n] == self.places[index] for n in failed) <= most
        self.num_retries += 1
        return self.num_retries <= most

    def kept(self) -> list[int]:
        """Indices of the samples that finished first and have a verdict, ascending."""
        values = self.values
        return sorted([index for index in self.finished if values[index] is not None])

    def most_carried(self) -> int:
        """Number of tokens of the longest response carried over from an earlier launch."""
        return max([carried.tokens for carried in self.carried], default=0)

    def carried_at(self, index: int) -> CarriedLength:
        """Tokens of an earlier launch that this sample began with. A sample that replaces a failed
        one begins with none."""
        if index < len(self.carried) and self.places[index] == index:
            return self.carried[index]
        return NOTHING_CARRIED

    def new_tokens(self, index: int) -> int:
        """Number of tokens that this launch generated for a sample that has left the engine,
        without those carried over."""
        kept = self.kept_tokens[index]
        return self.lengths[index] - (self.carried_at(index).tokens if kept is None else kept)

    def to_carry(self) -> tuple[CarriedLength, ...]:
        """Tokens that the unfinished group leaves to its next launch, by the samples' places."""
        left = [NOTHING_CARRIED] * (max(self.places) + 1)
        for index, place in enumerate(self.places):
            if self.states[index] is not SampleState.FAILED:
                left[place] = self._left_at(index)
        return tuple(left)

    def _left_at(self, index: int) -> CarriedLength:
        tokens, whole, before = self.lengths[index], self.whole[index], self.carried_at(index)
        if 0 < tokens < before.tokens and self.kept_tokens[index] == tokens and not whole:
            return before  # a trajectory that was stopped while it came out the same
        return CarriedLength(tokens, whole)

    def observed(self, *, complement: bool) -> tuple[list[int], list[int]]:
        """Lengths in tokens of complete responses, and of stopped ones.

        A carried-over response that came out differently was sampled a second time because it was
        long: only its first length says how long responses are, unless `complement` made the second
        one longer than where the first was stopped.
        """
        ends: tuple[list[int], list[int]] = ([], [])
        for index, state in enumerate(self.states):
            if state is SampleState.FAILED:
                continue
            tokens, whole = self.lengths[index], self.whole[index]
            kept, before = self.kept_tokens[index], self.carried_at(index)
            if kept is not None and kept < before.tokens and (before.whole or not complement):
                tokens, whole = before
            ends[not whole].append(tokens)
        return ends

    def settle(self, kept: Collection[int]) -> None:
        """Mark the samples with these indices as trained on, and other generated ones as
        dropped."""
        states = self.states
        for index, state in enumerate(states):
            if index in kept:
                # Looked up once, as most are: a step trains on thousands.
                scored = state is SampleState.SCORED
                states[index] = _TRAINED_NOW if scored else check(state, SampleState.TRAINED)
            elif state is SampleState.SCORED or state is SampleState.GENERATED:
                states[index] = check(state, SampleState.DROPPED)


def share_out(plan: RoundPlan, groups: Collection[Group]) -> int:
    """Give every group its quota, and return how many quotas have places. Places go to sources in
    proportion to their prompts, remainders to the sources with the largest fractions."""
    if not plan.tail.balance_sources:
        shares = {"": plan.prompts_needed}
    else:
        counts = Counter(group.prompt.source for group in groups)
        exact = {s: plan.prompts_needed * n / len(groups) for s, n in counts.items()}
        shares = {s: int(share) for s, share in exact.items()}
        by_remainder = sorted(shares, key=lambda s: (shares[s] - exact[s], s))
        for source in by_remainder[: plan.prompts_needed - sum(shares.values())]:
            shares[source] += 1
    quotas = {source: Quota(share) for source, share in shares.items()}
    for group in groups:
        quotas[group.prompt.source if plan.tail.balance_sources else ""].join(group)
    return sum(quota.num_missing > 0 for quota in quotas.values())
