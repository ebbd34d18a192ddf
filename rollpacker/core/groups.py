"""What a round is to do, and the groups that race in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from rollpacker.core.commands import RoundKind
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.lifecycle import SampleState, check
from rollpacker.core.tail_batching import Race

IN_ENGINE = -1
"""Instead of a length, while the engine has the sample."""


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
    balance_sources: bool = False
    max_retries: int = 2
    """Replacements launched per prompt for samples that the engine failed on."""
    tensor_parallel: int = 1
    speculate: bool = False
    min_verdicts: int = 2
    """A group with fewer is dropped: 2 where samples are compared with each other, else 1."""
    defers_to: int = 0
    """Which queue its deferred prompts join; see `NextRound`."""


class Quota:
    """Prompts that race for the same places."""

    __slots__ = ("groups", "num_missing")

    def __init__(self, num_missing: int) -> None:
        self.num_missing = num_missing
        self.groups: list[Group] = []


class Group:
    """The samples of one prompt in this round. Lists are by sample index."""

    __slots__ = (
        *("attempt", "deferred", "done", "finished", "lengths", "num_generating", "num_retries"),
        *("num_unscored", "prompt", "quota", "samples", "states", "streamed", "values", "whole"),
    )

    def __init__(self, prompt: PromptId, attempt: int) -> None:
        self.prompt = prompt
        self.attempt = attempt
        self.quota: Quota
        self.samples: list[SampleId] = []
        self.states: list[SampleState] = []
        self.lengths: list[int] = []
        """Tokens with which the engine let go of it; `IN_ENGINE` before."""
        self.whole: list[bool] = []
        """The response is complete, rather than stopped on its way."""
        self.values: list[float | None] = []
        """Verdicts."""
        self.finished: list[int] = []
        """Those that count in the race, first come first; never more than needed."""
        self.num_generating = 0
        self.num_unscored = 0
        """Generated, verdict awaited."""
        self.num_retries = 0
        self.done = False
        self.deferred = False
        self.streamed = False

    def kept(self) -> list[int]:
        """Indices that finished first and have a verdict."""
        values = self.values
        return sorted([index for index in self.finished if values[index] is not None])

    def settle(self, kept: Collection[int]) -> None:
        """The round is over: these are trained on, what else has come this far is dropped."""
        states = self.states
        for index, state in enumerate(states):
            if index in kept:
                states[index] = check(state, SampleState.TRAINED)
            elif state is SampleState.SCORED or state is SampleState.GENERATED:
                states[index] = check(state, SampleState.DROPPED)


def share_out(plan: RoundPlan, groups: Collection[Group]) -> int:
    """Give every group its quota; the number of quotas with places. Places go to sources in
    proportion to their prompts, remainders to the largest."""
    if not plan.balance_sources:
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
        group.quota = quotas[group.prompt.source if plan.balance_sources else ""]
        group.quota.groups.append(group)
    return sum(quota.num_missing > 0 for quota in quotas.values())
