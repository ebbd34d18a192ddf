"""From responses and their rewards to what the trainer takes: advantages and token weights per
sample."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollpacker.algo.config import AlgorithmConfig
from rollpacker.algo.shaping import shape_rewards
from rollpacker.algo.step import StepAdvantages, step_advantages
from rollpacker.algo.weights import token_weights
from rollpacker.core.ids import SampleId
from rollpacker.trainer.trainer import NonFiniteError, TokenScores, TrainSample

if TYPE_CHECKING:
    from rollpacker.rollout.engine import Response


def build_train_samples(
    groups: Sequence[Sequence[tuple[Response, float]]],
    config: AlgorithmConfig,
    *,
    weights: Sequence[Sequence[float]] | None = None,
    partial: bool = False,
    scores: Mapping[SampleId, TokenScores] | None = None,
    max_response_tokens: int | None = None,
) -> tuple[list[TrainSample], dict[str, float]]:
    """All samples of one step, in the order given. The denominators are global, so pass the whole
    step at once.

    Each group holds the (response, reward) pairs of one prompt; samples without a verdict are not
    among them. `weights` (one per sample, aligned with `groups`) multiply the samples' losses; the
    denominators stay those of an unweighted step. `scores` of every sample are needed if
    `config.needs_scores`, `max_response_tokens` for the overlong penalty and fixed-length. With
    `mask_truncated`, responses that were cut off have weight 0. The metrics describe the
    advantages; those of rewards and groups are derived from the event log.

    `partial`: these are whole groups, but not all of the step. Their token weights then lack the
    denominator: those of the whole step are smaller by one common factor.

    Raises `NonFiniteError`, naming the sample, if a reward is NaN or infinite; `ValueError` if the
    algorithm cannot work with what it is given.
    """
    if partial and config.needs_whole_batch:
        raise ValueError(
            f"algorithm {config.name} compares rewards over the whole step, so it cannot begin "
            "before the round is over: switch stream_trainer off"
        )
    flat = [(response, reward) for group in groups for response, reward in group]
    _check_rewards(groups, config)
    if not flat:
        return [], {}
    responses = [response for response, _ in flat]
    lengths = [len(response.tokens) for response in responses]
    rewards = torch.tensor([reward for _, reward in flat], dtype=torch.float64)
    step = step_advantages(
        shape_rewards(rewards, lengths, config=config, max_response_tokens=max_response_tokens),
        torch.tensor([index for index, group in enumerate(groups) for _ in group]),
        lengths,
        config=config,
        **_flat_scores(responses, scores, config),
    )
    of_token = token_weights(
        lengths,
        config=config,
        denominator=1 if partial else None,
        counted=[not _is_left_out(response, config) for response in responses],
        max_response_tokens=max_response_tokens,
    )
    of_sample = [1.0] * len(flat)
    if weights is not None:
        of_sample = [weight for group in weights for weight in group]
        of_token = [t * w for t, w in zip(of_token, of_sample, strict=True)]
    samples = _samples(responses, of_token, of_sample, step, scores or {})
    return samples, _metrics(step, samples)


def _check_rewards(
    groups: Sequence[Sequence[tuple[Response, float]]], config: AlgorithmConfig
) -> None:
    for group in groups:
        for response, reward in group:
            if not math.isfinite(reward):
                raise NonFiniteError(f"the reward of sample {response.sample} is {reward}")
        if len(group) == 1 and config.needs_groups:
            raise ValueError(
                f"sample {group[0][0].sample} is alone in its group, and algorithm {config.name} "
                f"(normalize_mean={config.normalize_mean}) compares samples of one prompt: "
                "set rollout.samples_per_prompt to 2 or more"
            )


def _is_left_out(response: Response, config: AlgorithmConfig) -> bool:
    return config.mask_truncated and response.finish_reason == "length"


def _flat_scores(
    responses: Sequence[Response],
    scores: Mapping[SampleId, TokenScores] | None,
    config: AlgorithmConfig,
) -> dict[str, Tensor | None]:
    """What other models said, sample after sample; None for what was not asked."""
    if not config.needs_scores:
        return {}
    names = ("log_probs", "ref_log_probs", "teacher_log_probs", "values")
    found: dict[str, list[float] | None] = {name: [] for name in names}
    for response in responses:
        own = (scores or {}).get(response.sample)
        if own is None:
            raise ValueError(
                f"algorithm {config.name} needs the scores of sample {response.sample}, and there "
                "are none"
            )
        for name in names:
            of_sample = getattr(own, name)
            so_far = found[name]
            if of_sample is None or so_far is None:
                found[name] = None
                continue
            assert len(of_sample) == len(response.tokens), f"{response.sample}: {name}"
            so_far.extend(of_sample)
    return {
        name: None if flat is None else torch.tensor(flat, dtype=torch.float64)
        for name, flat in found.items()
    }


def _samples(
    responses: Sequence[Response],
    token_weights: Sequence[float],
    loss_weights: Sequence[float],
    step: StepAdvantages,
    scores: Mapping[SampleId, TokenScores],
) -> list[TrainSample]:
    advantages = step.advantages.tolist()
    returns = None if step.returns is None else step.returns.tolist()
    starts = list(accumulate((len(r.tokens) for r in responses), initial=0))
    samples = []
    for index, (response, weight) in enumerate(zip(responses, token_weights, strict=True)):
        tokens = slice(starts[index], starts[index + 1])
        own = scores.get(response.sample, TokenScores())
        samples.append(
            TrainSample(
                sample=response.sample,
                prompt_tokens=response.prompt_tokens,
                response_tokens=response.tokens,
                rollout_log_probs=response.log_probs,
                advantage=tuple(advantages[tokens]) if step.per_token else advantages[index],
                token_weight=weight,
                loss_weight=loss_weights[index],
                ref_log_probs=own.ref_log_probs,
                values=own.values,
                returns=None if returns is None else tuple(returns[tokens]),
            )
        )
    return samples


def _metrics(step: StepAdvantages, samples: Sequence[TrainSample]) -> dict[str, float]:
    num_zero = sum(not any(_as_tuple(sample.advantage)) for sample in samples)
    return {
        "critic/advantages/mean": step.advantages.mean().item(),
        "critic/advantages/max": step.advantages.max().item(),
        "critic/advantages/min": step.advantages.min().item(),
        "critic/zero_advantages": num_zero / len(samples),
        **step.metrics,
    }


def _as_tuple(advantage: float | tuple[float, ...]) -> tuple[float, ...]:
    return advantage if isinstance(advantage, tuple) else (advantage,)
