"""The record that each rank returns of an update, and the step's metrics made of these records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollpacker.pipeline.stages.times import StageTimes
from rollpacker.trainer.step_sums import StepSums

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """One rank's record of an update. `sums` and memory are the rank's own; the gradient
    norms are over all ranks."""

    sums: StepSums
    grad_norm: float
    learning_rate: float
    critic_grad_norm: float | None
    peak_memory_bytes: int
    """The most bytes that this rank held (on its GPU, else as a process) since the last update."""
    lora_merge_loss: float | None = None
    """Share of the adapters' change that merging them into the weights would lose by rounding.
    None: there are no adapters, or merging does not round."""
    stage_times: StageTimes | None = None
    """Times of the passes in this rank's pipeline stage. None: the model is not in stages."""


def step_metrics(outcomes: Sequence[StepOutcome], peak_flops: float | None) -> dict[str, float]:
    """Return an update's metrics from all ranks' records. `peak_flops` is the peak FLOP/s of one
    rank's device; None: it is not known, and the metrics lack the utilization."""
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
