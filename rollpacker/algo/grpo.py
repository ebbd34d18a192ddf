"""GRPO: advantages relative to the group, the clipped policy loss, and the weights that aggregate
tokens.

Pure functions of tensors and numbers. The loss is per token and unweighted: how tokens add up to
one number is said by `token_weights` alone, whose denominators are global for the step. Sources:
DeepSeekMath (arXiv 2402.03300), DAPO (2503.14476) for clip_high, Dr. GRPO (2503.20783) for the
switches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rollpacker.algo.base import AlgorithmConfig

STD_EPSILON = 1e-4
"""Added to a group's standard deviation, as in TRL."""


def advantages(rewards: Tensor, group_ids: Tensor, *, config: AlgorithmConfig) -> Tensor:
    """Each reward relative to its group: (r - mean), divided by (std + 1e-4) if `normalize_std`.

    `rewards` [N] and `group_ids` [N] (integers, in any order) give [N] in the rewards' dtype. NaN
    is "no verdict": left out of its group's mean and standard deviation (unbiased), and NaN in the
    result. A group with fewer than two verdicts, or whose rewards are all equal, gives exactly 0.
    """
    assert rewards.shape == group_ids.shape and rewards.ndim == 1, (rewards.shape, group_ids.shape)
    result = torch.full_like(rewards, torch.nan)
    for group in torch.unique(group_ids):
        members = (group_ids == group) & ~rewards.isnan()
        values = rewards[members]
        if values.numel() == 0:
            continue
        if values.numel() == 1 or bool((values == values[0]).all()):
            result[members] = 0.0
            continue
        centred = values - values.mean()
        if config.normalize_std:
            centred = centred / (values.std() + STD_EPSILON)
        result[members] = centred
    return result


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    config: AlgorithmConfig,
    ref_logprobs: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate of every token, and its KL penalty if `ref_logprobs` are given.

    All tensors have one shape, whichever it is; `mask` (bool) is true where a token counts, None if
    all do. The loss is 0 elsewhere. The second result holds sums over the tokens that count: how
    many ratios were clipped low and high with an effect on the loss, and the KL estimate (k3).
    """
    log_ratio = logprobs - old_logprobs
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    is_low = (ratio < 1 - config.clip_low) & (advantages < 0)
    is_high = (ratio > 1 + config.clip_high) & (advantages > 0)
    sums = {"clip_ratio_low": is_low, "clip_ratio_high": is_high}
    if ref_logprobs is not None:
        ref_log_ratio = ref_logprobs - logprobs
        kl = ref_log_ratio.exp() - ref_log_ratio - 1
        loss = loss + config.kl_coef * kl
        sums["kl"] = kl.detach()
    if mask is not None:
        loss = torch.where(mask, loss, torch.zeros_like(loss))
        sums = {
            name: torch.where(mask, value, torch.zeros_like(value)) for name, value in sums.items()
        }
    return loss, {name: value.sum(dtype=loss.dtype) for name, value in sums.items()}


def token_weights(
    lengths: Sequence[int], *, config: AlgorithmConfig, denominator: int | None = None
) -> list[float]:
    """The weight of each token of each response, such that the step's loss is a plain weighted sum.

    `lengths` are the response tokens of *all* samples of the step (each at least 1). If they are
    only some, give any `denominator`: weights with another one differ by one common factor.
    """
    assert all(length > 0 for length in lengths), "a response has at least one token"
    match config.loss_aggregation:
        case "token-mean":
            return [1.0 / (denominator or sum(lengths))] * len(lengths)
        case "sequence-mean-token-mean":
            return [1.0 / ((denominator or len(lengths)) * length) for length in lengths]
        case "sequence-mean-token-sum":
            return [1.0 / (denominator or len(lengths))] * len(lengths)
