"""Everything between the rewards of a step and its advantages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rollpacker.algo.baselines import advantages as relative_rewards
from rollpacker.algo.config import AlgorithmConfig
from rollpacker.algo.gae import discounted_sums, generalized_advantages, last_tokens
from rollpacker.algo.kl import kl_estimate
from rollpacker.algo.turns import Turns, generalized_turn_advantages, relative_returns

WHITEN_EPSILON = 1e-8
"""Number that is added to the standard deviation of the step's advantages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAdvantages:
    """The advantages of some samples; float64 on the CPU."""

    advantages: Tensor
    """One number for each sample [N], or for each token [K] if `per_token`, or for each turn [T] of
    `turns`. NaN where there was no verdict."""
    per_token: bool
    turns: Turns | None = None
    """The dialogues' turns that have the advantages. None: samples or tokens have them."""
    returns: Tensor | None = None
    """Values that the critic is trained towards [K], one for each token. None without a critic."""
    metrics: Mapping[str, float] = field(default_factory=dict)


def step_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    lengths: Sequence[int],
    *,
    config: AlgorithmConfig,
    log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    teacher_log_probs: Tensor | None = None,
    values: Tensor | None = None,
    turns: Turns | None = None,
    known: Mapping[str, object] | None = None,
) -> StepAdvantages:
    """The advantages of N samples with K response tokens in all, `lengths` of each sample.

    `rewards` [N] and `group_ids` [N] (integers); NaN is "no verdict". `log_probs`, `ref_log_probs`,
    `teacher_log_probs` and `values` are [K], sample after sample, and needed as `config` demands:
    the first two for a KL penalty in the reward, the first and third for a teacher, the last for a
    critic. With `config.credit` by turn, `turns` have the rewards, and `rewards` are ignored.
    `known` has further arguments of a user's own function. With `config.needs_whole_batch` these
    must be all samples of the step.

    Metrics, where they apply: `critic/kl_reward/mean` (per token), `critic/returns/mean`,
    `critic/values/mean`, `critic/explained_variance`, `critic/teacher_kl/mean` (per token).

    Raises `ValueError` if a tensor that is needed is missing.
    """
    rewards = rewards.double()
    penalty, metrics = _penalty(log_probs, ref_log_probs, config)
    own = None
    if config.own_advantages is not None:
        own = partial(
            config.own_advantages,
            group_ids=group_ids,
            lengths=lengths,
            log_probs=log_probs,
            ref_log_probs=ref_log_probs,
            teacher_log_probs=teacher_log_probs,
            values=values,
            config=config,
            **(known or {}),
        )
    if config.credit == "turn":
        step = _from_turns(turns, group_ids, penalty, values, config)
    elif config.advantage == "teacher":
        step = _from_teacher(teacher_log_probs, log_probs)
    elif config.advantage == "gae":
        token_rewards = _token_rewards(rewards, penalty, lengths)
        step = _from_critic(token_rewards, values, lengths, config)
    else:
        step = _from_rewards(rewards, group_ids, penalty, lengths, config, own)
    if own is not None and config.advantage != "reward":
        token_rewards = _token_rewards(rewards, penalty, lengths)
        found = _checked_own(own(rewards=rewards, token_rewards=token_rewards), lengths, config)
        step = replace(step, advantages=found, per_token=_is_per_token(found, lengths))
    found = step.advantages
    if config.whiten:
        counts = lengths if step.turns is None else step.turns.lengths
        found = _whitened(found, None if step.per_token else counts)
    return replace(step, advantages=found, metrics={**metrics, **step.metrics})


def _from_teacher(teacher_log_probs: Tensor | None, log_probs: Tensor | None) -> StepAdvantages:
    teacher = _present(teacher_log_probs, "a teacher's log-probs")
    found = teacher - _present(log_probs, "the policy's log-probs")
    return StepAdvantages(
        advantages=found,
        per_token=True,
        metrics={"critic/teacher_kl/mean": -found.mean().item()},
    )


def _from_critic(
    token_rewards: Tensor, values: Tensor | None, lengths: Sequence[int], config: AlgorithmConfig
) -> StepAdvantages:
    values = _present(values, "a critic's values")
    found, returns = generalized_advantages(
        token_rewards, values, lengths, gamma=config.gamma, gae_lambda=config.gae_lambda
    )
    return StepAdvantages(
        advantages=found,
        per_token=True,
        returns=returns,
        metrics=_critic_metrics(returns, values),
    )


def _from_turns(
    turns: Turns | None,
    group_ids: Tensor,
    penalty: Tensor | None,
    values: Tensor | None,
    config: AlgorithmConfig,
) -> StepAdvantages:
    """Return the advantages of turns. `penalty` [K]: added to their rewards; None: no penalty."""
    if turns is None:
        raise ValueError("credit=turn needs the turns of each sample")
    rewards = turns.rewards if penalty is None else turns.sums(penalty)
    if config.advantage != "gae":
        found = relative_returns(rewards, group_ids, turns, config=config)
        return StepAdvantages(advantages=found, per_token=False, turns=turns)
    values = _present(values, "a critic's values")
    found, returns = generalized_turn_advantages(rewards, values, turns, config=config)
    return StepAdvantages(
        advantages=found,
        per_token=False,
        turns=turns,
        returns=turns.over_tokens(returns),
        metrics=_critic_metrics(returns, values[turns.first_tokens]),
    )


def _from_rewards(
    rewards: Tensor,
    group_ids: Tensor,
    penalty: Tensor | None,
    lengths: Sequence[int],
    config: AlgorithmConfig,
    own: Callable[..., Any] | None,
) -> StepAdvantages:
    """Return the advantages of samples or tokens, without a critic. If responses of a group are
    compared, a response's reward includes the KL penalties of its tokens; else each penalty affects
    only the tokens up to it. `own`: the user's function; None: the package's."""
    token_rewards = _token_rewards(rewards, penalty, lengths)
    if config.needs_groups and penalty is not None:
        of_token = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        rewards = rewards.index_add(0, of_token, penalty)
    if own is not None:
        found = _checked_own(own(rewards=rewards, token_rewards=token_rewards), lengths, config)
        if _is_per_token(found, lengths):
            if penalty is not None and not config.needs_groups:
                found = found + discounted_sums(penalty, lengths, config.gamma)
            return StepAdvantages(advantages=found, per_token=True)
    else:
        found = relative_rewards(rewards, group_ids, config=config)
    per_token = not config.needs_groups and (penalty is not None or config.gamma != 1)
    if per_token:
        found = discounted_sums(_token_rewards(found, penalty, lengths), lengths, config.gamma)
    return StepAdvantages(advantages=found, per_token=per_token)


def _is_per_token(advantages: Tensor, lengths: Sequence[int]) -> bool:
    """Whether a user's advantages are one per token, not one per sample. False if each sample has
    only one token, where both are the same."""
    return len(advantages) != len(lengths)


def _checked_own(found: Any, lengths: Sequence[int], config: AlgorithmConfig) -> Tensor:
    """The advantages that a user's function returned, as float64 on the CPU, for samples or tokens.
    Raises `ValueError` for another shape."""
    assert config.own_advantages is not None, "they come from there"
    said_by = config.own_advantages.said_by
    if not isinstance(found, Tensor) or found.shape not in ((len(lengths),), (sum(lengths),)):
        shape = f"of shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"{found!r:.40}"
        raise ValueError(
            f"{said_by}: advantages {shape} for {len(lengths)} samples with {sum(lengths)} tokens; "
            "give a tensor with one of each sample, or one of each token"
        )
    return found.detach().double().cpu()


def _token_rewards(rewards: Tensor, penalty: Tensor | None, lengths: Sequence[int]) -> Tensor:
    """Return the reward of each token [K]: its KL penalty (None: no penalty), plus the sample's
    reward at the sample's last token."""
    of_token = rewards.new_zeros(sum(lengths)) if penalty is None else penalty.clone()
    of_token[last_tokens(lengths)] += rewards
    return of_token


def _penalty(
    log_probs: Tensor | None, ref_log_probs: Tensor | None, config: AlgorithmConfig
) -> tuple[Tensor | None, dict[str, float]]:
    """The KL penalty of each token's reward [K], and its metric. None if the penalty is not in the
    reward."""
    if not config.kl_in_reward:
        return None, {}
    own = _present(log_probs, "the policy's log-probs")
    reference = _present(ref_log_probs, "the reference model's log-probs")
    assert config.kl_estimator is not None, "its row has one"
    kl = kl_estimate(own, reference, config.kl_estimator)
    return -config.kl_coef * kl, {"critic/kl_reward/mean": kl.mean().item()}


def _whitened(advantages: Tensor, lengths: Sequence[int] | None) -> Tensor:
    """The advantages shifted and scaled to mean 0 and (unbiased) standard deviation 1 over tokens.
    `lengths`: the number of tokens that share each advantage; None: each is one token's."""
    known = ~advantages.isnan()
    values = advantages[known]
    if len(values) == 0:
        return advantages
    if bool((values == values[0]).all()):
        return torch.where(known, 0.0, advantages)
    counts = torch.ones_like(advantages) if lengths is None else advantages.new_tensor(lengths)
    counts = counts[known]
    mean = (counts * values).sum() / counts.sum()
    variance = (counts * (values - mean).square()).sum() / (counts.sum() - 1)
    return (advantages - mean) / (variance.sqrt() + WHITEN_EPSILON)


def _critic_metrics(returns: Tensor, values: Tensor) -> dict[str, float]:
    known = ~returns.isnan()
    returns, values = returns[known], values[known]
    if len(returns) == 0:
        return {}
    found = {
        "critic/returns/mean": returns.mean().item(),
        "critic/values/mean": values.mean().item(),
    }
    spread = returns.var(correction=0).item()
    if spread > 0:
        unexplained = (returns - values).var(correction=0).item()
        found["critic/explained_variance"] = 1 - unexplained / spread
    return found


def _present(values: Tensor | None, what: str) -> Tensor:
    if values is None:
        raise ValueError(f"the advantages need {what} of each token")
    return values.detach().double()
