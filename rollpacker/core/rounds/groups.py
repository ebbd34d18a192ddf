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
"""Instead of a length, while the engine or its environment has the sample."""


class CarriedLength(NamedTuple):
    """Tokens that an earlier launch left of one response."""

    tokens: int
    whole: bool
    """True if the response is complete."""

    def under(self, cut_off_at: int | None) -> CarriedLength:
        """This length under a larger cap: a response that was cut off at `cut_off_at` tokens is not
        complete any more. None: the cap has not grown."""
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
    """Tokens that its launches have left of each response, by place. Empty: they left nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """Prompts that a round launches, and when it is over."""

    number: int
    kind: RoundKind
    version: int
    prompts: tuple[Waiting, ...]
    num_samples: int
    """Launched per prompt."""
    samples_needed: int
    """R0: kept per prompt."""
    prompts_needed: int
    """The round is over when so many prompts are done."""
    race: Race = "generated"
    tail: TailBatchingConfig
    max_retries: int = 2
    """Replacements launched per prompt for samples that the engine failed on, or whose environment
    raised or was too slow; and per place for those whose environment's process was lost."""
    tensor_parallel: int = 1
    speculate: bool = False
    min_verdicts: int = 2
    """A group with fewer is dropped: 2 where samples are compared with each other, else 1."""
    defers_to: int = 0
    """Queue that its deferred prompts join; see `NextRound`."""


class Quota:
    """Prompts that race for the same places."""

    __slots__ = ("groups", "num_awaited", "num_missing")

    def __init__(self, num_missing: int) -> None:
        self.num_missing = num_missing
        self.num_awaited = 0
        """Places kept for prompts that the round awaits, and that are not done yet."""
        self.groups: list[Group] = []

    def join(self, group: Group) -> None:
        """The group races here. It is awaited only as far as there are places."""
        group.quota = self
        self.groups.append(group)
        group.awaited = group.awaited and self.num_awaited < self.num_missing
        self.num_awaited += group.awaited

    def take_place(self, group: Group) -> bool:
        """A complete group takes a place, if one is left besides those that are kept."""
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
        """The round does not end without it."""
        self.quota: Quota
        self.places: list[int] = []
        """Place of each sample, which decides its noise and carried tokens: its own index, or the
        place of the failed sample that it replaces."""
        self.kept_tokens: list[int | None] = []
        """Carried tokens of each sample that came out the same. None: nobody compared them."""
        self.samples: list[SampleId] = []
        self.states: list[SampleState] = []
        self.lengths: list[int] = []
        """Tokens that it came to, when it was generated or let go of; `UNDER_WAY` before."""
        self.whole: list[bool] = []
        """The response is complete, rather than stopped on its way."""
        self.values: list[float | None] = []
        """Verdicts."""
        self.finished: list[int] = []
        """Indices of the samples that count in the race, first come first, never more than
        needed."""
        self.num_generating = 0
        self.num_unscored = 0
        """Generated, verdict awaited."""
        self.num_retries = 0
        self.done = False
        self.deferred = False
        self.streamed = False

    def add(self, count: int, state: SampleState) -> list[SampleId]:
        """So many samples more, in this state, each in a place of its own."""
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
        """Whether this sample, which has failed, may be replaced. There are so many tries for the
        prompt; with `of_place` (something broke that others share) for each place, and the prompt's
        stay as they are."""
        if of_place:
            failed = [n for n, state in enumerate(self.states) if state is SampleState.FAILED]
            return sum(self.places[n] == self.places[index] for n in failed) <= most
        self.num_retries += 1
        return self.num_retries <= most

    def kept(self) -> list[int]:
        """Indices that finished first and have a verdict."""
        values = self.values
        return sorted([index for index in self.finished if values[index] is not None])

    def most_carried(self) -> int:
        """Tokens of the longest response that was carried here."""
        return max([carried.tokens for carried in self.carried], default=0)

    def carried_at(self, index: int) -> CarriedLength:
        """Tokens of an earlier launch that this sample began with. A sample that replaces a failed
        one begins anew."""
        if index < len(self.carried) and self.places[index] == index:
            return self.carried[index]
        return NOTHING_CARRIED

    def new_tokens(self, index: int) -> int:
        """Tokens that this launch has generated of the sample, which has left the engine."""
        kept = self.kept_tokens[index]
        return self.lengths[index] - (self.carried_at(index).tokens if kept is None else kept)

    def to_carry(self) -> tuple[CarriedLength, ...]:
        """Tokens that a deferred group leaves to its next launch, by place."""
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
        """Lengths of complete responses, and where the others were stopped.

        A carried response that came out differently was drawn a second time because it was long:
        only its first draw says how long responses are, unless `complement` made the second one
        longer than where the first was stopped.
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
        """The round is over: these are trained on, what else has come this far is dropped."""
        states = self.states
        for index, state in enumerate(states):
            if index in kept:
                # Looked up once, as most are: a step trains on thousands.
                scored = state is SampleState.SCORED
                states[index] = _TRAINED_NOW if scored else check(state, SampleState.TRAINED)
            elif state is SampleState.SCORED or state is SampleState.GENERATED:
                states[index] = check(state, SampleState.DROPPED)


def share_out(plan: RoundPlan, groups: Collection[Group]) -> int:
    """Give every group its quota; the number of quotas with places. Places go to sources in
    proportion to their prompts, remainders to the largest."""
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
