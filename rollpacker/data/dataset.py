"""Configs of data sets, and the records of prompts. Does not import torch or datasets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from rollpacker.core.ids import PromptId

TRAIN = "train"
"""Name of the source of training prompts, if rewards are not chosen by the row's task."""


class DataError(ValueError):
    """The data cannot be used; the message says which row or column and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskConfig:
    """One reasoning-gym task in a mixture."""

    task: str
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the reasoning-gym task, such as min_terms."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError(f"weight must be more than 0, not {self.weight}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetConfig:
    """A data set of prompts (`data.train`, `data.eval`)."""

    kind: Literal["reasoning_gym", "jsonl", "parquet", "huggingface", "environment", "python"]
    """Where the rows come from. environment: `environment.function` provides them. python: a
    program gave them to `rollpacker.train`; not possible elsewhere. The others: files, a hub, or a
    generator."""
    path: str | None = None
    """A file, folder or glob (jsonl, parquet), or a dataset's folder or its name on the hub
    (huggingface). None for the other kinds."""
    split: str = "train"
    """Name of the split. For kind huggingface only."""
    subset: str | None = None
    """Name of the dataset's configuration. None: its only one. For kind huggingface only."""
    tasks: tuple[TaskConfig, ...] = ()
    """The tasks that rows are made of. For kind reasoning_gym only."""
    size: int | None = None
    """Number of rows to make, for reasoning_gym and for an environment without rows of its own.
    Other kinds: most rows to use, from the first on. None: all."""
    seed: int = 0
    """Seed from which rows are made, for kind reasoning_gym only. Their order has the run's
    seed."""
    prompt_column: str = "prompt"
    answer_column: str | None = None
    """The column that rewards get as `answer`, too. Another column of that name is then not passed
    on. None: no column is passed on under another name."""
    task_column: str | None = None
    """The column with the kind of task of each row, by which rewards can choose rows
    (`rewards[].tasks`). None: `task` if the rows have it, else `data_source`."""
    prompt_template: str | None = None
    """Python format string over the row's columns that makes the prompt, such as "{question}\\n".
    None: the prompt is a column."""
    prompt_function: str | None = None
    """Function that gets the row as a dict and returns the prompt, as `module:function` or
    `file.py:function`. Cannot be set together with `prompt_template`."""
    chat: Literal["auto"] | bool = "auto"
    """Whether text prompts go through the tokenizer's chat template, as one user message. auto: if
    there is a template and the model stops where it ends an assistant's turn, as instruct models do
    and base models do not. Chat messages always go through it. Rewards get prompts in the form that
    the data has, texts or messages."""
    system_prompt: str | None = None
    """System message put before chat messages that do not begin with one. With it, text prompts go
    through the chat template. None: there is none."""

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
    """The data set to evaluate on. None: there is none, unless `eval_fraction` holds out some
    rows."""
    eval_fraction: float = 0.0
    """Share of `train`, 0 to 1, that is held out for evaluation. A hash of the prompt decides, so
    that equal prompts are on the same side. 0: none."""
    max_prompt_tokens: int = 1024
    """Most tokens of a prompt. Longer prompts are dropped and counted."""
    max_dropped_fraction: float = 0.1
    """Largest share of prompts that may be dropped, 0 to 1. With more, the run does not start."""
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
    """One prompt that can be used."""

    prompt: str | list[dict[str, str]]
    """The prompt as in the data, which is what rewards get."""
    tokens: tuple[int, ...]
    """The token ids of the prompt, which are what the model gets."""
    columns: Mapping[str, Any]
    task: str | None = None
    """The value of the row's task column. None: there is none."""
    messages: list[dict[str, str]] | None = None
    """The messages from which the chat template made the tokens. None: the tokens are those of the
    text as it is."""
    where: str = ""
    """The file and line, or the dataset and row, that the prompt came from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """The usable prompts of one data set, tokenized, in the order of the data."""

    rows: tuple[PromptRow, ...]
    fingerprint: str
    """SHA-256 of all prompts, tokens and columns. A resumed run must have the same."""
    num_dropped: Mapping[str, int] = field(default_factory=dict)
    """Number of rows that were left out, by reason."""
    chat: bool = False
    """Whether the setting `chat` made text prompts go through the chat template."""
    told: tuple[str, ...] = ()
    """Lines for the terminal: how prompts are made from rows, and what the first prompt is."""


class Cursor(Protocol):
    """The order of the prompts: seeded and resumable."""

    def take(self, count: int) -> tuple[tuple[PromptId, ...], bool, bool]:
        """Return up to `count` prompts of the current epoch, whether the epoch ended with them, and
        whether all epochs have. The next call begins the next epoch."""
        ...

    @property
    def ended(self) -> bool:
        """Whether all epochs are finished."""
        ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...
