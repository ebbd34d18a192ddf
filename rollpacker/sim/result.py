"""The result of a simulation: a record per step, their mean, and idle device time by cause."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from rollpacker.pipeline.sim.phase import PipelineResult

BUBBLE_CAUSES: dict[str, str] = {
    "tail": "engines that had nothing left while others still generated",
    "reward_wait": "everything was generated, verdicts were still out",
    "migration": "devices that handed their requests over and waited for them to settle",
    "sync": "new weights on their way to the engines, and engines laid out anew",
}
"""Mapping from each cause of idle device time, which every simulation has, to its meaning."""
PIPELINE = "pipeline"
"""A further cause of idle device time: pipeline stages of the trainer that waited for a message, or
for the end of another replica's step."""
OTHER_POOL = "other_pool"
"""A further cause of idle device time, where the trainer has devices of its own: the trainer's
devices during generation, and the engines' devices during training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Seconds and counts of one optimizer step. `rollout_s`, `reward_s`, `train_s` and `sync_s` add
    up to `total_s`; `reward_s` is the wait for verdicts after the last response was generated."""

    kind: str
    rollout_s: float
    reward_s: float
    train_s: float
    sync_s: float
    total_s: float
    tensor_parallel: int
    preemptions: int
    max_response_tokens: int
    """Number of tokens of the longest response that the step trained on."""
    tokens_generated: int
    """Number of tokens that were generated for the step, including those of aborted samples."""
    tokens_trained: int
    num_trained: int
    """Number of samples that the step trained on."""
    num_streamed: int
    """Number of samples whose gradients began while other samples were still generated."""


JSON_STEP_KEYS = (
    *("kind", "rollout_s", "reward_s", "train_s", "sync_s", "total_s"),
    *("tensor_parallel", "preemptions", "max_response_tokens"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemResult:
    """The result of a scenario's simulated run with one system (set of RollPacker's features)."""

    steps: tuple[StepResult, ...]
    tokens_generated: int
    tokens_trained: int
    trained_length_mean: float
    policy_length_mean: float
    """Mean tokens of a response by the scenario's length law, as if no response was left out."""
    policy_length_p95: float
    tail_trained_share: float
    """Share of trained responses longer than `policy_length_p95`; 0.05 if none is left out."""
    bubble: Mapping[str, float]
    """Mapping from the cause of idle devices to device-seconds. The causes of `BUBBLE_CAUSES` are
    always there, `PIPELINE` and `OTHER_POOL` only where they apply."""
    device_seconds: float
    """Number of devices times the run's seconds; `bubble` tells how much of it was idle."""
    num_releases: int
    """How often engines' devices were released to the trainer within a round."""
    own_length_mean: float = math.nan
    """Mean tokens of a response to the prompts trained on, as many of each as were trained on, if
    no response had been left out and no weights had changed. nan: not known."""
    mismatch: float = 0.0
    """Share of tokens, kept from earlier launches and checked, that newer weights changed."""
    pipeline: PipelineResult | None = None
    """Result of the trainer's pipeline stages. None: the trainer has no pipeline stages."""

    @property
    def mean(self) -> dict[str, float]:
        """Mapping from the name of each number of `StepResult` to its mean over the steps."""
        names = [f.name for f in fields(StepResult) if f.name != "kind"]
        return {
            name: sum(getattr(step, name) for step in self.steps) / len(self.steps)
            for name in names
        }

    @property
    def trained_tokens_per_s(self) -> float:
        """Response tokens trained on per second, over all steps; nan without any time. A step that
        is shorter because it trains on less does not raise this number."""
        seconds = sum(step.total_s for step in self.steps)
        return sum(step.tokens_trained for step in self.steps) / seconds if seconds else math.nan

    @property
    def length_shift(self) -> float:
        """Mean trained length over the policy's own mean length, minus 1: -0.3 is 30 % shorter."""
        return self.trained_length_mean / self.policy_length_mean - 1

    @property
    def paired_shift(self) -> float:
        """Mean trained length over `own_length_mean`, minus 1. The prompts of both means are the
        same, so that it is exactly 0 if only the order of training changed."""
        return self.trained_length_mean / self.own_length_mean - 1

    def to_plain(self) -> dict[str, Any]:
        """The result as plain values, as `rollpacker simulate --json` prints it."""
        mean = self.mean
        return {
            "steps": [
                {name: getattr(step, name) for name in JSON_STEP_KEYS} for step in self.steps
            ],
            "mean": {name: mean[name] for name in JSON_STEP_KEYS if name != "kind"},
            "tokens_generated": self.tokens_generated,
            "tokens_trained": self.tokens_trained,
            "trained_tokens_per_s": self.trained_tokens_per_s,
            "trained_length_mean": self.trained_length_mean,
            "policy_length_mean": self.policy_length_mean,
            "policy_length_p95": self.policy_length_p95,
            "tail_trained_share": self.tail_trained_share,
            "bubble": dict(self.bubble),
            "device_seconds": self.device_seconds,
            "releases": self.num_releases,
            **({} if self.pipeline is None else {"pipeline": self.pipeline.to_plain()}),
        }
