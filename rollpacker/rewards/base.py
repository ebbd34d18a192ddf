"""The reward protocol and the records that cross it. Light."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


class RewardError(RuntimeError):
    """A reward is set up wrongly (not: a reward failed on a sample, which is `Failed`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardInput:
    """One sample as rewards see it."""

    prompt: str | list[dict[str, str]]
    """As in the dataset: text or chat messages."""
    completion: str
    """The response, decoded without special tokens."""
    completion_tokens: tuple[int, ...]
    finish_reason: str
    columns: Mapping[str, Any]
    """The dataset row's other columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    value: float
    parts: Mapping[str, float | None] = field(default_factory=dict)
    """Each function's own value, by name; None where it had no verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """No verdict. Never a zero."""

    reason: str
    parts: Mapping[str, float | None] = field(default_factory=dict)


class Reward(Protocol):
    names: tuple[str, ...]
    """Names of the parts, in order."""

    async def score(self, samples: Sequence[RewardInput]) -> list[Scored | Failed]:
        """Judge a batch; one verdict each, same order. Never raises for what a sample or a function
        did."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """One reward function (an entry of `rewards`)."""

    function: str
    """`module:function` or `file.py:function`, or the name of a built-in: `reasoning_gym`. Plain
    functions run in threads, several at a time and never in the main one: `signal.alarm` and what
    builds on it does not work there."""
    weight: float = 1.0
    timeout_s: float = 60.0
    """A call that takes longer is given up: no verdict."""
    name: str | None = None
    """What it is called in metrics. None: the function's own name."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments for the function."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ValueError(f"weight must be a number, not {self.weight}")
        if not self.timeout_s > 0:
            raise ValueError("timeout_s must be more than 0")
