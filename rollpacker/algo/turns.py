"""Credit turn by turn: what each turn of a trajectory was worth, from there to the end.

A turn's *return* is its own reward and, discounted by `turn_discount` from turn to turn, those of
the turns behind it; earlier turns do not enter. All tokens of a turn have the same advantage.

The turns of all samples lie one behind the other in one tensor [T], `Turns.counts` of each sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollpacker.algo.baselines import advantages as relative_rewards
from rollpacker.algo.config import AlgorithmConfig
from rollpacker.algo.gae import discounted_sums, generalized_advantages


@dataclass(frozen=True, slots=True)
class Turns:
    """The T turns of N samples: how many each sample has, their lengths and their rewards."""

    counts: Sequence[int]
    """Number of turns of each sample, at least one."""
    lengths: Sequence[int]
    """Number of tokens that the model sampled in each turn [T]."""
    rewards: Tensor
    """Reward of each turn alone [T], float64. NaN in a sample without a verdict."""

    @property
    def first_tokens(self) -> Tensor:
        """The index of each turn's first token [T] in the tensor of all tokens."""
        lengths = self._lengths
        return lengths.cumsum(0) - lengths

    def over_tokens(self, values: Tensor) -> Tensor:
        """The value of each turn [T], repeated for all of its tokens [K]."""
        return values.repeat_interleave(self._lengths)

    def sums(self, values: Tensor) -> Tensor:
        """The rewards of turns [T], each plus its tokens' `values` [K], such as KL penalties."""
        turn = torch.arange(len(self.lengths)).repeat_interleave(self._lengths)
        return self.rewards.index_add(0, turn, values)

    @property
    def _lengths(self) -> Tensor:
        return torch.tensor(self.lengths, dtype=torch.int64)


def relative_returns(
    rewards: Tensor, group_ids: Tensor, turns: Turns, *, config: AlgorithmConfig
) -> Tensor:
    """Advantages of turns [T]: returns of turns less the mean that `normalize_mean` names, divided
    by the standard deviation that `normalize_std` names, as `baselines.advantages` does with
    rewards.

    `rewards` [T] of turns, `group_ids` [N]. The step's statistics span all of its turns (GEM's
    return batch normalization, arXiv 2510.01051), the group's those at the same place: first turns
    with first turns (MT-GRPO, arXiv 2505.11821), see `places_in_groups`.
    """
    returns = discounted_sums(rewards, turns.counts, config.turn_discount)
    return relative_rewards(returns, places_in_groups(returns, group_ids, turns), config=config)


def places_in_groups(returns: Tensor, group_ids: Tensor, turns: Turns) -> Tensor:
    """The number of the group that each turn is compared in [T]: turns of one group of samples that
    have the same place in their dialogues.

    A turn that only one sample of a group came to would have nothing to be compared with. Such
    turns go into the group of the last place that at least two samples came to: a late success is
    worth something, even if all others had ended. Samples without a verdict (`returns`
    [T] of NaN) are not counted.
    """
    counts = torch.tensor(turns.counts, dtype=torch.int64)
    first = counts.cumsum(0) - counts
    groups: Tensor = torch.unique(group_ids, return_inverse=True)[1]
    has_verdict = ~returns[first].isnan()
    shared = torch.full((len(counts),), int(counts.max()) if len(counts) else 0)
    for group in range(int(groups.max()) + 1 if len(groups) else 0):
        known = counts[(groups == group) & has_verdict]
        if len(known) > 1:
            shared[groups == group] = known.sort(descending=True).values[1]
    place = torch.arange(len(returns)) - first.repeat_interleave(counts)
    place = torch.minimum(place, shared.repeat_interleave(counts) - 1)
    width = int(counts.max()) if len(counts) else 1
    return groups.repeat_interleave(counts) * width + place


def generalized_turn_advantages(
    rewards: Tensor, values: Tensor, turns: Turns, *, config: AlgorithmConfig
) -> tuple[Tensor, Tensor]:
    """Advantages [T] and returns [T] of turns, by GAE whose steps are turns. `rewards` [T];
    `values` [K] are the critic's before each token, of which the one before a turn's first token
    counts: what was to be expected when the turn began."""
    return generalized_advantages(
        rewards,
        values[turns.first_tokens],
        turns.counts,
        gamma=config.turn_discount,
        gae_lambda=config.gae_lambda,
    )
