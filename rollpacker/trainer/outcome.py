"""Reports of ranks at the end of a step, and the step's metrics made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollpacker.pipeline.stages.times import StageTimes
from rollpacker.trainer.step_sums import StepSums

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """One rank's report about an update. The norms are those of the whole gradient, the same on
    every rank."""

    sums: StepSums
    grad_norm: float
    learning_rate: float
    critic_grad_norm: float | None
    peak_memory_bytes: int
    """The most bytes that this rank's process or device held since the step before."""
    lora_merge_loss: float | None = None
    """Share of the adapters' change that merging would lose by rounding, after the update. None:
    nothing is rounded."""
    stage_times: StageTimes | None = None
    """Times of this rank's pipeline stage. None: the model is not in stages."""


def step_metrics(outcomes: Sequence[StepOutcome], peak_flops: float | None) -> dict[str, float]:
    """Return one step's metrics from all ranks' outcomes. `peak_flops` is what one rank's device
    could do, in FLOP/s; None: not known."""
    first = outcomes[0]
    sums = StepSums.merge(outcome.sums for outcome in outcomes)
    metrics = sums.metrics(
        grad_norm=first.grad_norm,
        learning_rate=first.learning_rate,
        critic_grad_norm=first.critic_grad_norm,
        peak_flops=peak_flops,
    )
    peak = max(outcome.peak_memory_bytes for outcome in outcomes)
    metrics["perf/train_peak_memory_gib"] = peak / GIB
    if first.lora_merge_loss is not None:
        metrics["train/lora_merge_loss"] = first.lora_merge_loss
    return metrics
