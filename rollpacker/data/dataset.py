"""Dataset configs and the records that cross to the rest. Light: no torch, no datasets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from rollpacker.core.ids import PromptId

TRAIN = "train"
"""Source of the prompts to train on, where rewards do not tell tasks apart."""


class DataError(ValueError):
    """The data cannot be used; the message says which row or column and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskConfig:
    """One reasoning-gym task in a mixture."""

    task: str
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the task's own config, such as min_terms."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError(f"weight must be more than 0, not {self.weight}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetConfig:
    """One set of prompts (`data.train`, `data.eval`)."""

    kind: Literal["reasoning_gym", "jsonl", "parquet", "huggingface", "environment", "python"]
    """environment: rows that `environment.function` brings along. python: rows that a program gave
    to `rollpacker.train`, and only there."""
    path: str | None = None
    """File, folder or glob (jsonl, parquet), or a dataset's folder or name on the hub
    (huggingface)."""
    split: str = "train"
    """huggingface only: name of the split."""
    subset: str | None = None
    """huggingface only: the dataset's configuration name."""
    tasks: tuple[TaskConfig, ...] = ()
    """reasoning_gym only: the mixture."""
    size: int | None = None
    """Number of rows to make, for reasoning_gym and for an environment that has no rows of its own.
    Others: only the first so many rows are used."""
    seed: int = 0
    """reasoning_gym only: seed of the rows themselves (the order is the run's seed's business)."""
    prompt_column: str = "prompt"
    answer_column: str | None = None
    """The column whose value rewards get as `answer` too. Another column of that name is then not
    passed on."""
    task_column: str | None = None
    """Says which kind of task a row is; rewards can choose rows by it (`rewards[].tasks`). None:
    `task` if the rows have it, else `data_source`."""
    prompt_template: str | None = None
    """Python format string over the row's columns that makes the prompt, such as
    "{question}\\n"."""
    prompt_function: str | None = None
    """`module:function` or `file.py:function`: takes the row as a dict and returns the prompt.
    Instead of `prompt_template`."""
    chat: Literal["auto"] | bool = "auto"
    """Whether a text prompt goes through the tokenizer's chat template, as one user message. auto:
    if there is a template and the model stops where that ends an assistant's turn, as instruct
    models do and base models do not. Chat messages always go through it. Rewards see what the data
    has: texts for texts, messages for messages."""
    system_prompt: str | None = None
    """Put in front of chat messages (a text prompt goes through the template then). Messages that
    begin with a system message keep their own."""

    def __post_init__(self) -> None:
        if self.kind == "reasoning_gym":
            if not self.tasks:
                raise ValueError("tasks must name at least one task, such as [{task: chain_sum}]")
            if self.size is None:
                raise ValueError("size must say how many rows to make")
            if self.path is not None:
                raise ValueError("path is not used by kind reasoning_gym; leave it out")
        elif self.kind == "environment":
            if self.path is not None or self.tasks:
                raise ValueError("path and tasks are not used by kind environment; leave them out")
        elif self.path is None:
            raise ValueError(f"path must say where the data is (kind {self.kind})")
        elif self.tasks:
            raise ValueError("tasks is for kind reasoning_gym only")
        if self.size is not None and self.size < 1:
            raise ValueError(f"size must be at least 1, not {self.size}")
        if self.prompt_template is not None and self.prompt_function is not None:
            raise ValueError("prompt_template and prompt_function exclude each other")
        if self.chat is False and self.system_prompt is not None:
            raise ValueError(
                "chat=false and system_prompt exclude each other: it is a chat message"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The data sets that prompts come from (`data.*`)."""

    train: DatasetConfig
    eval: DatasetConfig | None = None
    """The held-out prompts. None with eval_fraction 0: no evaluation."""
    eval_fraction: float = 0.0
    """Hold out this share of `train`, by a hash of the prompt, so that equal prompts fall on one
    side."""
    max_prompt_tokens: int = 1024
    """Most tokens of a prompt. Longer prompts are dropped and counted."""
    max_dropped_fraction: float = 0.1
    """Largest share of dropped prompts. A larger one stops the run before it starts."""
    shuffle: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.eval_fraction < 1:
            raise ValueError("eval_fraction must lie in [0, 1)")
        if self.eval is not None and self.eval_fraction:
            raise ValueError("set data.eval or data.eval_fraction, not both")
        if self.eval is not None and self.eval.kind == "environment":
            raise ValueError(
                "data.eval cannot be of kind environment: an environment brings one set of rows."
                " Hold some of them out by data.eval_fraction"
            )
        if self.max_prompt_tokens < 1:
            raise ValueError("max_prompt_tokens must be at least 1")
        if not 0 <= self.max_dropped_fraction <= 1:
            raise ValueError("max_dropped_fraction must lie in [0, 1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """One usable prompt."""

    prompt: str | list[dict[str, str]]
    """The prompt as the data has it, and as rewards see it."""
    tokens: tuple[int, ...]
    """The prompt as the model gets it."""
    columns: Mapping[str, Any]
    task: str | None = None
    """The value of the row's task column. None: there is none."""
    messages: list[dict[str, str]] | None = None
    """The messages that the chat template made the tokens of. None: the tokens are the text's
    own."""
    where: str = ""
    """The file and line, or the dataset and row, that it came from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """The usable prompts of one split, tokenized, in the file's order."""

    rows: tuple[PromptRow, ...]
    fingerprint: str
    """SHA-256 over prompts, tokens and columns; a resume compares it."""
    num_dropped: Mapping[str, int] = field(default_factory=dict)
    """Number of rows that were left out, by reason."""
    chat: bool = False
    """Whether `chat` let text prompts go through the chat template."""
    told: tuple[str, ...] = ()
    """Lines for people: how prompts are made of the rows, and the first prompt."""


class Cursor(Protocol):
    """The order in which prompts come. Seeded, resumable, exact."""

    def take(self, count: int) -> tuple[tuple[PromptId, ...], bool, bool]:
        """Up to `count` prompts of the epoch at hand, whether the epoch ended with them, and
        whether all epochs have. The next call then starts the next epoch."""
        ...

    @property
    def ended(self) -> bool:
        """Whether every epoch is through."""
        ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...
