"""Sums over the tokens to come, for all samples of a step at once. The tokens of all samples lie
one behind the other in one tensor [K], `lengths` of each sample."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def discounted_sums(values: Tensor, lengths: Sequence[int], factor: float) -> Tensor:
    """Return at each token the token's value plus `factor` times the sum at the next token of the
    same sample.

    [K] to [K]; what comes after a sample's last token is 0.
    """
    num_samples, longest = len(lengths), max(lengths, default=0)
    rows = torch.arange(num_samples).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    columns = torch.cat([torch.arange(length) for length in lengths] or [rows])
    # Time first, so that one step of the recursion is one contiguous row.
    padded = values.new_zeros(longest, num_samples)
    padded[columns, rows] = values
    for time in range(longest - 2, -1, -1):
        padded[time] += factor * padded[time + 1]
    return padded[columns, rows]


def generalized_advantages(
    rewards: Tensor, values: Tensor, lengths: Sequence[int], *, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """GAE (arXiv 1506.02438): advantages [K] and returns [K], which are advantages plus values.
    `rewards` [K] are those of each token, `values` [K] the critic's before each token. The value
    after a sample's last token is 0: the response has ended."""
    next_values = values.roll(-1)
    next_values[last_tokens(lengths)] = 0
    errors = rewards + gamma * next_values - values
    advantages = discounted_sums(errors, lengths, gamma * gae_lambda)
    return advantages, advantages + values


def last_tokens(lengths: Sequence[int]) -> Tensor:
    """The index of each sample's last token [N] in the tensor of all tokens."""
    return torch.tensor(lengths, dtype=torch.int64).cumsum(0) - 1
