"""From responses and their rewards to what the trainer takes: advantages and token weights per
sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from rollpacker.algo.base import AlgorithmConfig
from rollpacker.algo.table import ALGORITHMS
from rollpacker.trainer.base import NonFiniteError, TrainSample

if TYPE_CHECKING:
    from rollpacker.rollout.base import Response


def build_train_samples(
    groups: Sequence[Sequence[tuple[Response, float]]],
    config: AlgorithmConfig,
    *,
    weights: Sequence[Sequence[float]] | None = None,
    partial: bool = False,
) -> tuple[list[TrainSample], dict[str, float]]:
    """All samples of one step, in the order given. The denominators are global, so pass the whole
    step at once.

    Each group holds the (response, reward) pairs of one prompt; samples without a verdict are not
    among them. `weights` (one per sample, aligned with `groups`) multiply the samples' losses; the
    denominators stay those of an unweighted step. The metrics describe the advantages; those of
    rewards and groups are derived from the event log.

    `partial`: these are whole groups, but not all of the step. Their token weights then lack the
    denominator: those of the whole step are smaller by one common factor.

    Raises `NonFiniteError`, naming the sample, if a reward is NaN or infinite.
    """
    flat = [(response, reward) for group in groups for response, reward in group]
    for response, reward in flat:
        if not math.isfinite(reward):
            raise NonFiniteError(f"the reward of sample {response.sample} is {reward}")
    if not flat:
        return [], {}
    algorithm = ALGORITHMS[config.name]
    rewards = torch.tensor([reward for _, reward in flat], dtype=torch.float64)
    group_ids = torch.tensor([index for index, group in enumerate(groups) for _ in group])
    advantages = algorithm.advantages(rewards, group_ids, config=config)
    token_weights = algorithm.token_weights(
        [len(r.tokens) for r, _ in flat], config=config, denominator=1 if partial else None
    )
    if weights is not None:
        of_sample = [weight for group in weights for weight in group]
        token_weights = [t * w for t, w in zip(token_weights, of_sample, strict=True)]
    samples = [
        TrainSample(
            sample=response.sample,
            prompt_tokens=response.prompt_tokens,
            response_tokens=response.tokens,
            rollout_log_probs=response.log_probs,
            advantage=advantage,
            token_weight=weight,
        )
        for (response, _), advantage, weight in zip(
            flat, advantages.tolist(), token_weights, strict=True
        )
    ]
    return samples, {
        "critic/advantages/mean": advantages.mean().item(),
        "critic/advantages/max": advantages.max().item(),
        "critic/advantages/min": advantages.min().item(),
    }
