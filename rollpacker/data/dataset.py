"""Configs of data sets, and the records of prompts. Does not import torch or datasets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from rollpacker.bounds import check_at_least, check_positive, check_within
from rollpacker.core.ids import PromptId

TRAIN = "train"
"""The `source` of training prompts (the first part of a prompt's id). Where rewards are chosen by
rows' tasks, the source is the row's task instead."""


class DataError(ValueError):
    """The data cannot be used; the message says which row or column and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskConfig:
    """One reasoning-gym task (a generator of problems) in a mixture."""

    task: str
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the reasoning-gym task, such as min_terms."""

    def __post_init__(self) -> None:
        check_positive(self, "weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetConfig:
    """Settings of a data set of prompts (`data.train`, `data.eval`)."""

    kind: Literal["reasoning_gym", "jsonl", "parquet", "huggingface", "environment", "python"]
    """Where the rows come from. jsonl, parquet: files. huggingface: a dataset of the hub or a
    folder. reasoning_gym: generators of problems. environment: `environment.function` provides
    them. python: a program gave them to `rollpacker.train`; not possible elsewhere."""
    path: str | None = None
    """A file, folder or glob (jsonl, parquet), or a dataset's folder or its name on the hub
    (huggingface). None: the kind needs no path."""
    split: str = "train"
    """Name of the dataset's split. For kind huggingface only."""
    subset: str | None = None
    """Name of a configuration of the dataset. None: its only one. For kind huggingface only."""
    tasks: tuple[TaskConfig, ...] = ()
    """The tasks whose generators make the rows. For kind reasoning_gym only."""
    size: int | None = None
    """Number of rows to make, for reasoning_gym and for an environment without rows of its own.
    Other kinds: most rows to use, from the first on. None: all."""
    seed: int = 0
    """Seed from which rows are made, for kind reasoning_gym only. The run's seed orders them."""
    prompt_column: str = "prompt"
    answer_column: str | None = None
    """Name of the column with the right answer, which rewards also get under the name
    `answer`. A column that is called `answer` is then not passed on. None: rewards get columns
    under their own names only."""
    task_column: str | None = None
    """Name of the column with each row's kind of task, by which rewards can choose rows
    (`rewards[].tasks`). None: `task` if the rows have that column, else `data_source`."""
    prompt_template: str | None = None
    """Python format string over the row's columns that makes the prompt, such as "{question}\\n".
    None: the prompt is a column."""
    prompt_function: str | None = None
    """Function from a row, as a dict, to its prompt: `module:function` or `file.py:function`. None:
    there is none. Cannot be set together with `prompt_template`."""
    chat: Literal["auto"] | bool = "auto"
    """Whether text prompts go through the tokenizer's chat template, as one user message. auto:
    they do if there is a template and the model stops where it ends an assistant's turn, as
    instruct models do and base models do not. Chat messages always go through it. Rewards get
    prompts in the form that the data has, texts or messages."""
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
        check_at_least(self, 1, "size")
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
    """The data set to evaluate on. None: there is none, but `eval_fraction` may hold out rows."""
    eval_fraction: float = 0.0
    """Share of `train`, 0 to 1, that is held out for evaluation. A hash of the prompt decides, so
    that equal prompts are on the same side. 0: none."""
    max_prompt_tokens: int = 1024
    """Largest number of tokens of a prompt. Rows with longer prompts are dropped and counted."""
    max_dropped_fraction: float = 0.1
    """Largest share of a data set's prompts that may be dropped as too long, 0 to 1. If more would
    be, the run does not start."""
    shuffle: bool = True

    def __post_init__(self) -> None:
        check_within(self, "[0, 1)", "eval_fraction")
        if self.eval is not None and self.eval_fraction:
            raise ValueError("set data.eval or data.eval_fraction, not both")
        if self.eval is not None and self.eval.kind == "environment":
            raise ValueError(
                "data.eval cannot be of kind environment: an environment brings one set of rows."
                " Hold some of them out by data.eval_fraction"
            )
        check_at_least(self, 1, "max_prompt_tokens")
        check_within(self, "[0, 1]", "max_dropped_fraction")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """One usable row of a data set, with its prompt."""

    prompt: str | list[dict[str, str]]
    """The prompt as in the data (a text or chat messages), which is what rewards get."""
    tokens: tuple[int, ...]
    """The prompt's token ids, which are what the model gets."""
    columns: Mapping[str, Any]
    task: str | None = None
    """Value of the row's task column. None: the row has no task."""
    messages: list[dict[str, str]] | None = None
    """The chat messages that the template made the tokens of. None: the prompt is a plain text."""
    where: str = ""
    """Where the row comes from, for error messages: file and line, or dataset and row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """The usable prompts of one data set, tokenized, in the order of the data."""

    rows: tuple[PromptRow, ...]
    fingerprint: str
    """SHA-256 of all prompts, tokens and columns. A resumed run must have the same fingerprint."""
    num_dropped: Mapping[str, int] = field(default_factory=dict)
    """Number of rows that were left out, by reason, such as "prompt too long"."""
    chat: bool = False
    """Whether the setting `chat` made text prompts go through the chat template."""
    told: tuple[str, ...] = ()
    """Lines for the terminal that say how prompts are made from rows, and show the first prompt."""


class Cursor(Protocol):
    """The order in which prompts are taken from a data set: seeded and resumable."""

    def take(self, count: int) -> tuple[tuple[PromptId, ...], bool, bool]:
        """Return up to `count` ids of prompts of the current epoch, whether the epoch ended with
        them, and whether all epochs have ended. The next call begins the next epoch."""
        ...

    @property
    def ended(self) -> bool:
        """Whether all epochs of the run are finished, so that there are no more prompts."""
        ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...
