"""The trainer protocol and the records that cross it. Light: no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from rollpacker.core.ids import SampleId


class TrainerError(RuntimeError):
    """Training cannot go on."""


class NonFiniteError(TrainerError):
    """A NaN or an infinity in rewards, loss or gradient. No update was applied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The policy (`model.*`)."""

    path: str
    """A Hugging Face model folder, or a name on the hub."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on CUDA, float32 on a CPU. With bfloat16 the optimizer keeps float32 master
    weights."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gradient_checkpointing: bool = False
    chat_template_kwargs: Mapping[str, object] | None = None
    """Passed on to the tokenizer's `apply_chat_template`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Optimizer and micro-batches (`train.*`)."""

    steps: int | None = None
    """Optimizer steps. The long queue is emptied at the end, which can add steps. None: until
    `epochs` are done."""
    epochs: int | None = None
    """Passes over the training data. None: as many as `steps` needs. One of the two must be set."""
    learning_rate: float = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    min_learning_rate_ratio: float = 0.0
    """Where linear and cosine end, as a share of learning_rate."""
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    max_grad_norm: float | None = 1.0
    """None: gradients are not clipped."""
    micro_batch_tokens: int = 4096
    """Padded tokens per micro-batch; samples are sorted by length first. One longer sample gets its
    own."""
    threads: int | Literal["auto"] = "auto"
    """Torch threads of this process on a CPU. auto: a short measurement picks."""

    def __post_init__(self) -> None:
        if self.steps is None and self.epochs is None:
            raise ValueError("set train.steps or train.epochs")
        for name in ("steps", "epochs", "micro_batch_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if self.schedule != "constant" and self.steps is None:
            raise ValueError(
                f"schedule={self.schedule} needs to know where it ends: set train.steps"
            )
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise ValueError(f"learning_rate must be a positive number, not {self.learning_rate}")
        if self.warmup_steps < 0:
            raise ValueError("warmup_steps must not be negative")
        if not 0 <= self.min_learning_rate_ratio <= 1:
            raise ValueError("min_learning_rate_ratio must lie between 0 and 1")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise ValueError("weight_decay must be a number from 0 upwards")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError("betas must lie in [0, 1)")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ValueError("max_grad_norm must be more than 0, or null for none")
        if self.threads != "auto" and self.threads < 1:
            raise ValueError("threads must be at least 1, or auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSample:
    """One sample as the trainer takes it. Which algorithm made the numbers, the trainer does not
    know."""

    sample: SampleId
    prompt_tokens: tuple[int, ...]
    response_tokens: tuple[int, ...]
    rollout_log_probs: tuple[float, ...]
    advantage: float
    """Holds for every response token."""
    token_weight: float
    """Weight of each response token's loss in the step's sum, with the step's *global* denominator
    already in it: 1 / (tokens of the whole step) for token-mean. Any split of the samples then adds
    up to the same gradient. A sample that is accumulated before the denominator is known has
    another one in it, and `Trainer.rescale` makes up for it."""


class Trainer(Protocol):
    """`accumulate` any number of times, then `apply` once: one optimizer step. `rescale` comes
    between two of them if the first samples had to be weighted provisionally."""

    version: int
    """Optimizer steps applied so far."""

    async def accumulate(self, samples: Sequence[TrainSample]) -> None:
        """Add these samples' share of the step's gradient.

        Raises `NonFiniteError` that names the samples if the loss is NaN or infinite.
        """
        ...

    async def rescale(self, factor: float) -> None:
        """Multiply what was accumulated so far, gradient and loss, by `factor`."""
        ...

    async def apply(self) -> Mapping[str, float]:
        """Clip, step, forget the gradients; `version` goes up by one.

        Returns the step's metrics, named as in `docs/metrics.md`. Raises `NonFiniteError`, with
        weights and optimizer untouched and the gradients forgotten, if the gradient is NaN or
        infinite.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write `folder/model` (a Hugging Face folder) and `folder/trainer` (safetensors and JSON,
        no pickle)."""
        ...

    def load(self, folder: Path) -> None:
        """Restore weights, optimizer, schedule and version from what `save` wrote, bit for bit."""
        ...
