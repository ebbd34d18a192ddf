"""What an algorithm is configured by. Light: no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

LossAggregation = Literal["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    """The algorithm and its switches (`algorithm.*`)."""

    name: Literal["grpo"] = "grpo"
    normalize_std: bool = True
    """Divide a group's centred rewards by their standard deviation. Off is the Dr. GRPO choice."""
    clip_low: float = 0.2
    """The probability ratio is clipped below at 1 - clip_low ..."""
    clip_high: float = 0.28
    """... and above at 1 + clip_high."""
    loss_aggregation: LossAggregation = "token-mean"
    old_logprobs: Literal["recomputed", "rollout"] = "recomputed"
    """What the ratio's denominator is. "recomputed": the trainer's own, under the weights that
    sampled; with one optimizer step a round the ratio is then exactly 1. "rollout": the engine's,
    so that the ratio also corrects the difference between the two implementations."""
    kl_coef: float = 0.0
    """Weight of the KL penalty (k3 estimator) against the model that the run started from. 0: no
    reference model is kept."""

    def __post_init__(self) -> None:
        for name in ("clip_low", "clip_high", "kl_coef"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a number from 0 upwards, not {value}")
        if self.clip_low > 1:
            raise ValueError("clip_low must not be more than 1")
