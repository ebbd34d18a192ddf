"""Advantages as rewards relative to a group (the samples of one prompt) or to the whole step."""

from __future__ import annotations

import torch
from torch import Tensor

from rollpacker.algo.config import AlgorithmConfig

STD_EPSILON = 1e-4
"""Number that is added to a standard deviation of rewards, as in TRL."""


def advantages(rewards: Tensor, group_ids: Tensor, *, config: AlgorithmConfig) -> Tensor:
    """Advantages: each reward less the mean that `normalize_mean` names, divided by the standard
    deviation that `normalize_std` names plus 1e-4.

    `rewards` [N] and `group_ids` [N] (integers, in any order) give [N] in the rewards' dtype.
    Standard deviations are unbiased and those of the rewards as they come, not of the centred ones.
    NaN is "no verdict": left out of every statistic, and NaN in the result. Where a mean is
    subtracted, the result is exactly 0 in a group (or step) with one verdict or equal rewards.
    Whitening (`whiten`) is not done here: it counts tokens, see `step_advantages`.
    """
    assert rewards.shape == group_ids.shape and rewards.ndim == 1, (rewards.shape, group_ids.shape)
    has_verdict = ~rewards.isnan()
    values = rewards[has_verdict]
    groups = torch.unique(group_ids[has_verdict], return_inverse=True)[1]
    whole = torch.zeros_like(groups)
    if config.normalize_mean != "none":
        centred = _centred(
            values,
            whole if config.normalize_mean == "batch" else groups,
            leave_one_out=config.normalize_mean == "leave-one-out",
        )
    else:
        centred = values
    if config.normalize_std != "none":
        std = _std(values, whole if config.normalize_std == "batch" else groups)
        centred = centred / (std + STD_EPSILON)
    result = torch.full_like(rewards, torch.nan)
    result[has_verdict] = centred
    return result


def _centred(values: Tensor, groups: Tensor, *, leave_one_out: bool) -> Tensor:
    """Return the values [M] less the mean of their group, or with `leave_one_out` of the others in
    it. The result is exactly 0 where all values of a group are equal."""
    lowest = _per_group(values, groups, "amin")
    highest = _per_group(values, groups, "amax")
    centred = values - _per_group(values, groups, "mean")
    if leave_one_out:
        count = _per_group(torch.ones_like(values), groups, "sum")
        centred = centred * count / (count - 1).clamp(min=1)
    return torch.where(lowest == highest, torch.zeros_like(centred), centred)


def _std(values: Tensor, groups: Tensor) -> Tensor:
    """The unbiased standard deviation of each value's group [M]; 0 for a group of one."""
    count = _per_group(torch.ones_like(values), groups, "sum")
    squares = (values - _per_group(values, groups, "mean")).square()
    return (_per_group(squares, groups, "sum") / (count - 1).clamp(min=1)).sqrt()


def _per_group(values: Tensor, groups: Tensor, how: str) -> Tensor:
    """A statistic of each group (`how`: as for `scatter_reduce`), repeated for its members [M]."""
    size = int(groups.max()) + 1 if len(groups) else 0
    empty = values.new_zeros(size)
    return empty.scatter_reduce(0, groups, values, how, include_self=False)[groups]
