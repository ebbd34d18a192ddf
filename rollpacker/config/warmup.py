"""The configuration of supervised fine-tuning before reinforcement learning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rollpacker.bounds import check_at_least, check_positive, check_within
from rollpacker.trainer.trainer import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupConfig:
    """Supervised fine-tuning before reinforcement learning (`rollpacker warmup`)."""

    output: str
    """Path of the Hugging Face folder that the warmup writes."""
    stages: tuple[WarmupStage, ...]
    model: ModelConfig | None = None
    """Model whose weights training starts from. None: `architecture` is set instead."""
    architecture: dict[str, object] | None = None
    """Architecture of a model that starts with random weights: `model_type` and the fields of its
    transformers config. None: `model` is set instead."""
    alphabet: str | None = None
    """Characters that are the tokens of a tokenizer to build. None: `model` has a tokenizer."""
    markers: tuple[str, ...] = ()
    """Longer texts that are single tokens of the built tokenizer, such as marks in a template."""
    chat_template: str | None = None
    """Chat template of the built tokenizer, in Jinja; its end token is `<eos>`. None: none."""
    seed: int = 0
    threads: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if (self.model is None) == (self.architecture is None):
            raise ValueError("set model (start from weights) or architecture (start from scratch)")
        if self.architecture is not None and self.alphabet is None:
            raise ValueError("architecture needs an alphabet for its character tokenizer")
        if self.architecture is None and (self.markers or self.chat_template is not None):
            raise ValueError(
                "markers and chat_template are of architecture's tokenizer; a model has its own"
            )
        if not self.stages:
            raise ValueError("stages must have at least one entry")
        check_at_least(self, 1, "threads", otherwise="auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupStage:
    """One pass of supervised training steps over one file, or over rows that a function makes."""

    path: str | None = None
    """JSONL file whose rows have `prompt` and `completion`, texts or chat messages, or `messages`.
    The loss is on the completion, or on each message of the assistant, its tool calls too, and on
    the token that ends it. `tools` of a row are the schemas that the chat template shows."""
    function: str | None = None
    """Function in place of `path`: `module:function` or `file.py:function`. It takes a
    `random.Random` and yields rows as dicts like a file's, of which the first `rows` are taken."""
    rows: int = 20_000
    """Number of rows that are taken from `function`."""
    steps: int
    batch_size: int = 64
    learning_rate: float = 1e-3
    final_learning_rate_ratio: float = 0.1
    """Learning rate at the last step, as a share of `learning_rate`; it falls linearly."""
    warmup_steps: int = 50
    max_grad_norm: float = 1.0
    max_loss: float | None = None
    """Mean loss of the last 20 steps above which the stage fails. None: it fails at none."""

    @property
    def source(self) -> str:
        """The stage's `path` or `function`; empty if neither is set."""
        return self.path or self.function or ""

    def __post_init__(self) -> None:
        if (self.path is None) == (self.function is None):
            raise ValueError("set path (a file) or function (which makes the rows)")
        check_at_least(self, 1, "rows", "steps", "batch_size")
        check_positive(self, "learning_rate", "max_grad_norm")
        check_within(self, "[0, 1]", "final_learning_rate_ratio")
        check_at_least(self, 0, "warmup_steps")
