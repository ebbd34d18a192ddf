"""The record of an algorithm's switches. Light: no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Advantage = Literal["reward", "gae", "teacher"]
NormalizeMean = Literal["group", "leave-one-out", "batch", "none"]
NormalizeStd = Literal["group", "batch", "none"]
Objective = Literal["clipped", "cispo"]
ImportanceRatio = Literal["token", "sequence", "sequence-product"]
LossAggregation = Literal[
    "token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "fixed-length"
]
KlEstimator = Literal["k1", "k2", "k3"]
KlIn = Literal["loss", "reward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One value for each switch in which algorithms differ. `AlgorithmConfig` explains each under
    the same name; a switch that its user leaves at None takes the value given here."""

    advantage: Advantage = "reward"
    normalize_mean: NormalizeMean = "group"
    normalize_std: NormalizeStd = "none"
    whiten: bool = False
    objective: Objective = "clipped"
    importance_ratio: ImportanceRatio = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    loss_aggregation: LossAggregation = "token-mean"
    kl_estimator: KlEstimator = "k3"
    kl_in: KlIn = "loss"
