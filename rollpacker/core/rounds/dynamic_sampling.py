"""Dynamic sampling: a group (the samples of one prompt) whose rewards are all equal teaches
nothing, so the step leaves it out and looks for others.

A step goes on with further rounds of fresh prompts ("refills") until it has its number of groups,
or has made as many as it may. A prompt that is left out does not come back in a later round. After
DAPO (arXiv 2503.14476), section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rollpacker.bounds import check_at_least
from rollpacker.core.commands import Drop, TrainOn
from rollpacker.core.ids import SampleId

Group = tuple[SampleId, ...]
"""A group: the samples of one prompt that are trained on together."""

NO_SIGNAL = "no signal: all its rewards are equal"


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicSamplingConfig:
    """Settings of training without groups whose rewards are all equal
    (`rollout.dynamic_sampling`)."""

    enabled: bool = False
    max_refills: int = 3
    """Maximum number of further rounds ("refills") by which a step replaces the groups that it
    leaves out. If they do not suffice, the step trains on fewer groups. There are no refills for
    the last prompts of an epoch or of the run."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "max_refills")


def split_by_signal(
    groups: Iterable[Group], has_signal: Callable[[Group], bool]
) -> tuple[tuple[Group, ...], list[Drop]]:
    """Returns groups whose rewards differ (`has_signal`), and `Drop` commands for the others."""
    groups = tuple(groups)
    drops = [Drop(prompt=g[0].prompt, reason=NO_SIGNAL) for g in groups if not has_signal(g)]
    return tuple(group for group in groups if has_signal(group)), drops


class StepGroups:
    """Groups (the samples of one prompt each) that the rounds of one step have brought so far."""

    def __init__(self, target: int) -> None:
        self.target = target
        """Number of groups that the step should train on."""
        self.groups: list[tuple[SampleId, ...]] = []
        self.lengths: list[int] = []
        """Number of tokens of each sample of `groups`, in their order. Empty if neither loss
        weights nor factors depend on lengths."""
        self.num_refills = 0
        self.streamed: tuple[int, str] = (0, "")
        """Number of samples whose gradients were begun before their round was over, and, in words,
        why the last round had none."""

    @property
    def missing(self) -> int:
        return self.target - len(self.groups)

    def may_refill(self, config: DynamicSamplingConfig) -> bool:
        """Whether the step lacks groups and may replace them by a further round, if prompts are
        left. A request to stop the run changes nothing here, so the step is the same."""
        return config.enabled and self.num_refills < config.max_refills and self.missing > 0

    def add(self, groups: Iterable[tuple[SampleId, ...]], lengths: Iterable[int]) -> None:
        self.groups += groups
        self.lengths += lengths

    def train_on(
        self, step: int, weights: Iterable[float] | None, *, says_missing: bool
    ) -> TrainOn:
        """The `TrainOn` command of this step's groups. `weights`: loss weight of each sample, in
        the order of `lengths`; None: all are 1. `says_missing`: the command has the number of
        groups that the step lacks (else 0)."""
        by_group = None
        if weights is not None:
            flat = iter(weights)
            by_group = tuple(tuple(next(flat) for _ in group) for group in self.groups)
        num_streamed, why_not = self.streamed
        return TrainOn(
            step=step,
            groups=tuple(self.groups),
            weights=by_group,
            num_missing=self.missing if says_missing else 0,
            num_streamed=num_streamed,
            not_streamed="" if num_streamed else why_not,
        )

    def note_streamed(self, num_samples: int, why_not: str) -> None:
        """Adds `num_samples`, the number of samples of a round whose gradients were begun before it
        was over. `why_not`: why there were none, in words; empty if there were some."""
        self.streamed = (self.streamed[0] + num_samples, why_not)


def updates_of(num_groups: int, num_updates: int) -> tuple[int, ...]:
    """Number, from 0, of the optimizer step in which each group is trained on, where a training
    step makes `num_updates` optimizer steps. Groups are dealt out in turn, so that counts differ by
    at most one. With fewer groups there are fewer optimizer steps."""
    assert num_groups >= 0 and num_updates >= 1, (num_groups, num_updates)
    return tuple(group % num_updates for group in range(num_groups))
