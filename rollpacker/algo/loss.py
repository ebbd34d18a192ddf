"""The losses of the policy and of the critic, per token and unweighted.

`token_weights` alone decides how tokens add up to one number, with denominators that are global for
the step. `policy_loss` is the same arithmetic for padded tensors, with everything in one call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rollpacker.algo.config import AlgorithmConfig
from rollpacker.algo.kl import kl_estimate
from rollpacker.algo.own import OwnFunction
from rollpacker.algo.weights import token_weights

MAX_LOG_RATIO = 20.0
"""Largest logarithm of a ratio, far outside of any clip. Beyond it exp() overflows and 0 times
infinity enters the gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """The losses of K tokens, and sums over these tokens for metrics."""

    per_token: Tensor
    """The loss of each token [K], differentiable."""
    sums: Mapping[str, Tensor]
    """Detached sums over the tokens, by name. For the policy: `clip_ratio_low` and
    `clip_ratio_high`, numbers of tokens whose ratio was clipped with an effect on the loss; a
    user's own loss has its own numbers instead. Where such a switch is on: `clip_ratio_dual`, the
    same for the dual clip; `kl`, the estimated KL divergence; `mismatch_weight` and
    `mismatch_weight_squared`, sums of the weights as applied and of their squares;
    `mismatch_outside`, number of tokens whose mismatch ratio lies beyond its bounds."""


def token_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    sample_ids: Tensor,
    *,
    num_samples: int,
    config: AlgorithmConfig,
    ref_log_probs: Tensor | None = None,
    rollout_log_probs: Tensor | None = None,
    entropy: Tensor | None = None,
) -> TokenLoss:
    """The loss of each of the K tokens of some whole samples.

    All tensors are [K]; `sample_ids` (int64, 0 to num_samples - 1) has the sample of each token.
    Gradients flow through `log_probs` and `entropy` alone. `ref_log_probs` are needed for a KL
    penalty in the loss, and otherwise give the KL as a metric; `rollout_log_probs` are needed for a
    mismatch correction, `entropy` for an entropy bonus.

    Raises `ValueError` if a tensor that is needed is missing.
    """
    _check_present(config, ref_log_probs, rollout_log_probs, entropy)
    old_log_probs = old_log_probs.detach()
    ratio = _importance_ratio(log_probs, old_log_probs, sample_ids, num_samples, config)
    own = config.own_loss
    if own is None:
        loss, sums = _surrogate(ratio, log_probs, advantages, config)
    else:
        loss, sums = _from_outside(
            own,
            log_probs,
            old_log_probs=old_log_probs,
            advantages=advantages,
            sample_ids=sample_ids,
            num_samples=num_samples,
            ref_log_probs=ref_log_probs,
            rollout_log_probs=rollout_log_probs,
            entropy=entropy,
            config=config,
        )
    if config.mismatch_correction != "none":
        assert rollout_log_probs is not None  # _check_present
        difference = old_log_probs - rollout_log_probs
        numbers = _mismatch_weight(difference, sample_ids, num_samples, config)
        loss = loss * numbers["mismatch_weight"]
        sums.update(numbers)
    if ref_log_probs is not None:
        assert config.kl_estimator is not None, "its row has one"
        kl = kl_estimate(log_probs, ref_log_probs.detach(), config.kl_estimator)
        if config.kl_in == "loss" and config.kl_coef > 0:
            penalty = kl * ratio if config.kl_bias_correction else kl
            loss = loss + config.kl_coef * penalty
        sums["kl"] = kl.detach()
    if config.entropy_coef > 0:
        assert entropy is not None  # _check_present
        loss = loss - config.entropy_coef * entropy
    dtype = loss.dtype
    return TokenLoss(
        per_token=loss, sums={name: value.sum(dtype=dtype) for name, value in sums.items()}
    )


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    config: AlgorithmConfig,
    ref_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a whole step, aggregated as `config.loss_aggregation` says, and its metrics.

    All tensors are [N, T], a row is one response; `advantages` may also be [N]. `mask` is true (or
    1) at the response's tokens; what stands elsewhere has no effect, NaN included. Rows without a
    token, or whose advantage is NaN (no verdict), are left out, denominators included.
    "fixed-length" without `fixed_length` divides by T. The metrics are means over the tokens that
    count, named as in `TokenLoss.sums`. Without any such token the loss is 0.

    Raises `ValueError` if a tensor that the config needs is missing.
    """
    per_token = advantages if advantages.ndim == 2 else advantages[:, None].expand_as(logprobs)
    real = mask.bool()
    real = real & ~(per_token.isnan() & real).any(dim=1, keepdim=True)
    counted = real.any(dim=1)
    real = real[counted]

    def flat(values: Tensor) -> Tensor:
        return values[counted][real]

    def if_given(values: Tensor | None) -> Tensor | None:
        return None if values is None else flat(values)

    lengths = real.sum(dim=1)
    sample_ids = torch.arange(len(lengths), device=real.device).repeat_interleave(lengths)
    result = token_loss(
        flat(logprobs),
        flat(old_logprobs),
        flat(per_token),
        sample_ids,
        num_samples=len(lengths),
        config=config,
        ref_log_probs=if_given(ref_logprobs),
        rollout_log_probs=if_given(rollout_logprobs),
        entropy=if_given(entropy),
    )
    weights = token_weights(lengths.tolist(), config=config, max_response_tokens=mask.shape[1])
    of_token = torch.tensor(weights, dtype=logprobs.dtype, device=real.device)[sample_ids]
    num_tokens = max(len(sample_ids), 1)
    metrics = {name: value / num_tokens for name, value in result.sums.items()}
    return (result.per_token * of_token).sum(), metrics


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, config: AlgorithmConfig
) -> TokenLoss:
    """PPO's clipped squared error of each token, halved: [K] each, differentiable in `values`.

    A value that moved by more than `value_clip` from its old one counts as if it had moved by that
    much, if that makes the error larger. `sums` has `value_clip_ratio`, the number of such values;
    without a clip it is empty.
    """
    error = (values - returns).square()
    if config.value_clip is None:
        return TokenLoss(per_token=error / 2, sums={})
    moved = (values - old_values).clamp(-config.value_clip, config.value_clip)
    clipped = (old_values + moved - returns).square()
    is_clipped = (clipped.detach() > error.detach()).sum(dtype=error.dtype)
    return TokenLoss(
        per_token=torch.maximum(error, clipped) / 2, sums={"value_clip_ratio": is_clipped}
    )


def _importance_ratio(
    log_probs: Tensor,
    old_log_probs: Tensor,
    sample_ids: Tensor,
    num_samples: int,
    config: AlgorithmConfig,
) -> Tensor:
    """Probability ratios [K], all the same within a sample if `importance_ratio` is that of the
    whole response.

    The gradient of such a ratio goes to all of its tokens, which all learn from the mean of their
    advantages. With credit=turn a token's gradient goes to the token itself instead, as in
    GSPO-token (arXiv 2507.18071, section 4.3): the same value, and the same gradient where
    advantages are equal.
    """
    log_ratio = log_probs - old_log_probs
    if config.importance_ratio != "token":
        log_ratio = _sample_sums(log_ratio, sample_ids, num_samples)
        ones = torch.ones_like(sample_ids, dtype=log_ratio.dtype)
        counts = _sample_sums(ones, sample_ids, num_samples).clamp(min=1)
        if config.importance_ratio == "sequence":
            log_ratio = log_ratio / counts
        log_ratio = log_ratio[sample_ids]
        if config.credit == "turn":
            own = log_probs - log_probs.detach()
            share = counts[sample_ids] if config.importance_ratio == "sequence-product" else 1
            log_ratio = log_ratio.detach() + share * own
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _from_outside(
    own: OwnFunction, log_probs: Tensor, **known: object
) -> tuple[Tensor, dict[str, Tensor]]:
    """Call a user's loss function. Returns the loss of each token [K], and the function's numbers
    of each token for metrics [K]. Raises `ValueError` for a tensor of another shape."""
    found = own(log_probs=log_probs, **known)
    loss, numbers = found if isinstance(found, tuple) else (found, {})
    named = {"a loss": loss, **{f"a metric {name}": value for name, value in numbers.items()}}
    for what, value in named.items():
        if not isinstance(value, Tensor) or value.shape != log_probs.shape:
            shape = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r}"
            raise ValueError(
                f"{own.said_by}: {what} {shape} for {len(log_probs)} tokens; give one of each "
                "token, unweighted (algorithm.loss_aggregation adds them up)"
            )
    return loss, {name: value.detach() for name, value in numbers.items()}


def _surrogate(
    ratio: Tensor, log_probs: Tensor, advantages: Tensor, config: AlgorithmConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    assert config.clip_low is not None and config.clip_high is not None, "its row has them"
    low, high = 1 - config.clip_low, 1 + config.clip_high
    clipped = ratio.clamp(low, high)
    if config.objective == "cispo":
        loss = -clipped.detach() * advantages * log_probs
        return loss, {"clip_ratio_low": ratio < low, "clip_ratio_high": ratio > high}
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    flags = {
        "clip_ratio_low": (ratio < low) & (advantages < 0),
        "clip_ratio_high": (ratio > high) & (advantages > 0),
    }
    if config.clip_dual is not None:
        at_most = torch.minimum(loss, -config.clip_dual * advantages)
        loss = torch.where(advantages < 0, at_most, loss)
        flags["clip_ratio_dual"] = (ratio > config.clip_dual) & (advantages < 0)
    return loss, flags


@torch.no_grad()
def _mismatch_weight(
    difference: Tensor, sample_ids: Tensor, num_samples: int, config: AlgorithmConfig
) -> dict[str, Tensor]:
    """Return, by metric name, the weight [K] that corrects for engine and trainer giving a token
    different probabilities, its square, and whether the ratio lay outside of the bounds."""
    if config.mismatch_correction.startswith("sequence"):
        difference = _sample_sums(difference, sample_ids, num_samples)[sample_ids]
    ratio = difference.exp()
    low = 0.0 if config.mismatch_min is None else config.mismatch_min
    outside = (ratio < low) | (ratio > config.mismatch_max)
    if config.mismatch_correction.endswith("mask"):
        weight = ratio.masked_fill(outside, 0.0)
    else:
        weight = ratio.clamp(low, config.mismatch_max)
    return {
        "mismatch_weight": weight,
        "mismatch_weight_squared": weight.square(),
        "mismatch_outside": outside,
    }


def _sample_sums(values: Tensor, sample_ids: Tensor, num_samples: int) -> Tensor:
    return values.new_zeros(num_samples).index_add(0, sample_ids, values)


def _check_present(
    config: AlgorithmConfig,
    ref_log_probs: Tensor | None,
    rollout_log_probs: Tensor | None,
    entropy: Tensor | None,
) -> None:
    if ref_log_probs is None and config.kl_coef > 0 and config.kl_in == "loss":
        raise ValueError("kl_coef > 0 with kl_in=loss needs the reference model's log-probs")
    if rollout_log_probs is None and config.mismatch_correction != "none":
        raise ValueError("mismatch_correction needs the engine's log-probs")
    if entropy is None and config.entropy_coef > 0:
        raise ValueError("entropy_coef > 0 needs the entropy of each token")
