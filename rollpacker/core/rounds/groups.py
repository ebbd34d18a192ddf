"""The plan of a round, and its groups: the samples of each prompt that the round launches."""

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
"""Stands in place of a sample's length while an engine or an environment has the sample."""


class CarriedLength(NamedTuple):
    """Number of tokens that an earlier launch (submission to an engine) left of one response."""

    tokens: int
    whole: bool
    """True if these tokens are a complete response, rather than the start of one."""

    def under(self, cut_off_at: int | None) -> CarriedLength:
        """Returns this length, marked as incomplete if the response has at least `cut_off_at`
        tokens. `cut_off_at`: former limit on responses; None: it was not raised."""
        is_over = cut_off_at is not None and self.tokens >= cut_off_at
        return CarriedLength(self.tokens, whole=False) if is_over else self


NOTHING_CARRIED = CarriedLength(0, False)


_TRAINED_NOW = check(SampleState.SCORED, SampleState.TRAINED)


class Waiting(NamedTuple):
    """A prompt that waits for a round, with what earlier launches left of its responses."""

    prompt: PromptId
    attempt: int = 0
    """Number of earlier launches of the prompt, each of which left it unfinished; the next launch's
    samples have this number as `SampleId.attempt`."""
    carried: tuple[CarriedLength, ...] = ()
    """Number of tokens that earlier launches left of each response, by index. Empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """Plan of a round (one batch of generation): what it launches, what it needs, and which queue
    takes the prompts that it leaves unfinished."""

    number: int
    kind: RoundKind
    version: int
    prompts: tuple[Waiting, ...]
    num_samples: int
    """Number of samples launched per prompt."""
    samples_needed: int
    """Number of samples kept per prompt (R0)."""
    prompts_needed: int
    """Number of prompts that must have finished for the round to be over."""
    race: Race = "generated"
    tail: TailBatchingConfig
    max_retries: int = 2
    """How often a failed sample is replaced at most. Replacements are counted per prompt if the
    engine failed on the sample, or its environment raised or was too slow, and per sample if the
    environment's process was lost."""
    tensor_parallel: int = 1
    speculate: bool = False
    min_verdicts: int = 2
    """Least number of samples with a verdict of the rewards for a group (a prompt's samples) to be
    trained on, rather than dropped: 2 where samples are compared with each other, else 1."""
    most_verified: int | None = None
    """Most carried tokens of a sample (left by an earlier launch) that an engine verifies in
    passes. None: all."""
    defers_to: int = 0
    """Number, from 0, of the further round that takes unfinished prompts and keeps the first to
    finish (its "tier"). A number beyond the last: they wait for a long round."""


class Quota:
    """Prompts that compete for the same places among those that a step trains on: all prompts of
    the round, or with `balance_sources` those of one source."""

    __slots__ = ("groups", "num_awaited", "num_missing")

    def __init__(self, num_missing: int) -> None:
        self.num_missing = num_missing
        self.num_awaited = 0
        """Places reserved for unfinished groups that the round waits for (`Group.awaited`)."""
        self.groups: list[Group] = []

    def join(self, group: Group) -> None:
        """Adds a group that competes for this quota's places in training. One that must be awaited
        gets a reserved place; if none is left, its `awaited` becomes False."""
        group.quota = self
        self.groups.append(group)
        group.awaited = group.awaited and self.num_awaited < self.num_missing
        self.num_awaited += group.awaited

    def take_place(self, group: Group) -> bool:
        """Gives a complete group one of the quota's places in training, if any is left besides
        those kept for others. Returns whether the group has a place now."""
        if group.awaited:
            self.num_awaited -= 1
        elif self.num_missing <= self.num_awaited:
            return False
        self.num_missing -= 1
        return True


# A list per fact of a sample, since rounds have thousands of them and every event reads some.
class Group:
    """The samples of one prompt in this round. Lists have an entry per sample, by sample index."""

    __slots__ = (
        *("attempt", "awaited", "carried", "deferred", "done", "finished", "kept_tokens"),
        *("lengths", "most_verified", "num_generating", "num_retries", "num_unscored", "places"),
        *("prompt", "quota", "samples", "states", "streamed", "values", "whole"),
    )

    def __init__(
        self, waiting: Waiting, awaited_after: int | None, most_verified: int | None
    ) -> None:
        self.prompt, self.attempt, self.carried = waiting
        self.most_verified = most_verified
        """Most carried tokens of a sample that an engine verifies in passes. None: all."""
        self.awaited = awaited_after is not None and self.attempt >= awaited_after
        """True if the round must wait for this group, deferred too often by earlier rounds."""
        self.quota: Quota
        self.places: list[int] = []
        """For each sample the index of its random numbers and its tokens from earlier launches: its
        own index or, if it replaces a failed sample, that sample's entry here."""
        self.kept_tokens: list[int | None] = []
        """For each sample the number of tokens from an earlier launch that were sampled again as
        they were. None: not compared."""
        self.samples: list[SampleId] = []
        self.states: list[SampleState] = []
        self.lengths: list[int] = []
        """Tokens that each sample had when it left the engine; `UNDER_WAY` if it has not left."""
        self.whole: list[bool] = []
        """Whether each response is complete, rather than stopped by an abort."""
        self.values: list[float | None] = []
        """Reward of each sample. None: the sample has no verdict yet, or judging it failed."""
        self.finished: list[int] = []
        """Indices of the first samples to finish, in order; at most as many as the group needs."""
        self.num_generating = 0
        self.num_unscored = 0
        """Number of samples that are generated and have no verdict yet."""
        self.num_retries = 0
        self.done = False
        self.deferred = False
        self.streamed = False

    def add(self, count: int, state: SampleState) -> list[SampleId]:
        """Adds `count` samples in this state, with indices of their own, and returns their ids."""
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
        """Counts a replacement of the failed sample `index`, and returns whether it is allowed: a
        prompt may have `most`. With `of_place` (what failed serves several prompts) each sample may
        have `most` of its own instead, which do not count for the prompt."""
        if of_place:
            failed = [n for n, state in enumerate(self.states) if state is SampleState.FAILED]
            return sum(self.places[n] == self.places[index] for n in failed) <= most
        self.num_retries += 1
        return self.num_retries <= most

    def kept(self) -> list[int]:
        """Indices, ascending, of the samples to train on: first to finish, and with a verdict."""
        values = self.values
        return sorted([index for index in self.finished if values[index] is not None])

    def most_carried(self) -> int:
        """Tokens of the prompt's longest response that an earlier launch left. 0: none is left."""
        return max([carried.tokens for carried in self.carried], default=0)

    def carried_at(self, index: int) -> CarriedLength:
        """Tokens of an earlier launch that this sample began with: none if it is a replacement."""
        if index < len(self.carried) and self.places[index] == index:
            return self.carried[index]
        return NOTHING_CARRIED

    def new_tokens(self, index: int) -> int:
        """Number of tokens that this launch generated for a sample that has left the engine; tokens
        kept from an earlier launch do not count, unless they were generated as before."""
        kept = self.kept_tokens[index]
        if kept is None:
            kept = self.carried_at(index).tokens
        elif self.most_verified is not None:
            kept = min(kept, self.most_verified)
        return self.lengths[index] - kept

    def to_carry(self) -> tuple[CarriedLength, ...]:
        """Number of tokens that each response of an unfinished group leaves to the prompt's next
        launch. Indices are those in `places`: a replacement stands in a failed sample's place."""
        left = [NOTHING_CARRIED] * (max(self.places) + 1)
        for index, place in enumerate(self.places):
            if self.states[index] is not SampleState.FAILED:
                left[place] = self._left_at(index)
        return tuple(left)

    def _left_at(self, index: int) -> CarriedLength:
        tokens, whole, before = self.lengths[index], self.whole[index], self.carried_at(index)
        if 0 < tokens < before.tokens and self.kept_tokens[index] == tokens and not whole:
            return before  # it was stopped while it came out the same
        return CarriedLength(tokens, whole)

    def observed(self, *, complement: bool) -> tuple[list[int], list[int]]:
        """Lengths in tokens of complete responses, and those that stopped responses had reached. A
        response that an earlier launch had left, but that came out differently now, counts with its
        length in that launch: only slow prompts are launched again, so the new length is biased.
        With `complement` (a response never ends before the length at which it was cut off, so that
        the new length is not biased) one that had been cut off counts with its new length."""
        ends: tuple[list[int], list[int]] = ([], [])
        for index, state in enumerate(self.states):
            if state is SampleState.FAILED:
                continue
            tokens, whole = self._left_at(index)
            kept, before = self.kept_tokens[index], self.carried_at(index)
            if kept is not None and kept < before.tokens and (before.whole or not complement):
                tokens, whole = before
            ends[not whole].append(tokens)
        return ends

    def settle(self, kept: Collection[int]) -> None:
        """Marks the samples with the indices `kept` as trained on, and other samples that are
        generated or judged as dropped."""
        states = self.states
        for index, state in enumerate(states):
            if index in kept:
                # Looked up once, as most are: a step trains on thousands.
                scored = state is SampleState.SCORED
                states[index] = _TRAINED_NOW if scored else check(state, SampleState.TRAINED)
            elif state is SampleState.SCORED or state is SampleState.GENERATED:
                states[index] = check(state, SampleState.DROPPED)


def share_out(plan: RoundPlan, groups: Collection[Group]) -> int:
    """Gives every group its quota: the prompts with which it competes for places among those that
    the step trains on. Returns the number of quotas with at least one place. With `balance_sources`
    each source has a quota in proportion to its prompts, otherwise there is one for all."""
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
