"""Learning-rate schedules, as a pure function of the step."""

from __future__ import annotations

import math

from rollpacker.trainer.base import TrainConfig


def learning_rate(step: int, config: TrainConfig, total_steps: int | None) -> float:
    """The rate of optimizer step `step` (from 0).

    From the end of the warm-up on, transformers' constant, linear and cosine schedules. The warm-up
    itself rises from 1/(warmup_steps + 1) instead of from 0: a first step at rate 0 would waste a
    whole round. Steps beyond `total_steps` (they empty the long queue) go on at the last planned
    rate.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return config.learning_rate
    assert total_steps is not None, "linear and cosine need total_steps"
    step = min(step, max(total_steps - 1, config.warmup_steps))
    span = max(total_steps - config.warmup_steps, 1)
    progress = min((step - config.warmup_steps) / span, 1.0)
    if config.schedule == "linear":
        share = 1.0 - progress
    else:
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    floor = config.min_learning_rate_ratio
    return config.learning_rate * (floor + (1.0 - floor) * share)
