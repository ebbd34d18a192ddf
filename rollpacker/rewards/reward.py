"""The reward protocols and the records that cross them. Light.

controller -> Reward (routes, weights, sums) -> RewardPart (one reward) -> a worker, a sandbox,
                                                                           an endpoint
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple, Protocol

from rollpacker.core.checks.deadlines import AdaptiveDeadlineConfig
from rollpacker.environments.environment import Episode


class RewardError(RuntimeError):
    """A reward is set up wrongly (not: a reward failed on a sample, which is `Failed`)."""


class Progress(NamedTuple):
    """Progress of a run, for rewards that change with it."""

    steps_done: int = 0
    num_steps: int = 1
    """Steps of the whole run."""


UNKNOWN = Progress()


class TurnRewards(NamedTuple):
    """A trajectory's turns."""

    num_drawn: tuple[int, ...]
    """Tokens that the model drew in each."""
    values: tuple[float, ...]
    """Reward of each turn by itself, without the rewards of later turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardInput:
    """One sample as rewards see it."""

    prompt: str | list[dict[str, str]]
    """The prompt as in the dataset: text or chat messages. Functions get completions of the same
    kind, unless there is an episode."""
    completion: str
    """The response, decoded without special tokens."""
    completion_tokens: tuple[int, ...]
    finish_reason: str
    columns: Mapping[str, Any]
    """The dataset row's other columns."""
    task: str | None = None
    """The value of the row's task column, by which rewards choose their samples. None: nothing is
    routed."""
    messages: list[dict[str, str]] | None = None
    """The messages that the chat template made the prompt of. None: the prompt did not go through a
    template."""
    progress: Progress = UNKNOWN
    """The run's progress when the sample is judged."""
    episode: Episode | None = None
    """The dialogue of a sample of several turns: then `completion` and its tokens are the last
    message, and `prompt` is the environment's first message, if it said one. None: there was one
    response."""

    @property
    def asked(self) -> str | list[dict[str, str]]:
        """The model's question in the form in which the model got it, which judges and reward
        models go by."""
        return self.prompt if self.messages is None else self.messages


class Cause(StrEnum):
    """The cause of a missing verdict."""

    SAMPLE = "sample"
    """This response cannot be judged: an unreadable reply, a reward that raises on it. Asking again
    would not help."""
    DEADLINE = "deadline"
    """The reward did not answer in time."""
    INFRASTRUCTURE = "infrastructure"
    """A worker died or hung, an endpoint was down: nothing that the response did. Asked once more,
    on another worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    value: float
    parts: Mapping[str, float | None] = field(default_factory=dict)
    """The value of each reward, by name; None where it does not apply."""
    turns: tuple[float, ...] = ()
    """Parts of the value that the turns of a trajectory earned; they add up to it. Empty: the value
    is that of the whole trajectory, which counts at the last turn in the verdict of all rewards."""
    seconds: float | None = None
    """Execution time that adaptive deadlines learn from, without any waiting; for a program with
    several tests that of the slowest. None: whoever called measures."""
    correct: bool | None = None
    """Whether what was timed was right. None: a value above 0 is."""
    timed_out: bool = False
    """The answer ran into its time limit, and counts as wrong for it."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers that the reward logged in the call that judged this sample, by the names that it
    gave."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Values that the reward logged for this sample, by column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A sample has no verdict. That is never a zero."""

    reason: str
    parts: Mapping[str, float | None] = field(default_factory=dict)
    cause: Cause = Cause.SAMPLE
    seconds: float | None = None


class Reward(Protocol):
    """The protocol of all rewards of a run together, as the controller sees them."""

    names: tuple[str, ...]
    """Names of the parts, in order."""

    async def open(self) -> None:
        """Start workers in the running loop. Scoring opens what is not open yet."""
        ...

    async def score(
        self, samples: Sequence[RewardInput], *, timeout_s: float | None = None
    ) -> list[Scored | Failed]:
        """Judge a batch; one verdict each, same order. Never raises for what a sample or a function
        did. `timeout_s` limits each single check (for a program: each test) and replaces the
        reward's own limit. Cancelling the call ends what runs for it."""
        ...

    def outage(self) -> str | None:
        """The outage of a service outside of this machine that the rewards wait for, in words.
        None: there is none."""
        ...

    def broken(self) -> str | None:
        """The reason why there will be no verdict any more, in words. None: there will be."""
        ...

    def metrics(self) -> dict[str, float]:
        """Counts since the start that some parts keep, as `PART/NAME`."""
        ...

    async def close(self) -> None:
        """End every worker; nothing is left behind."""
        ...


class RewardPart(Protocol):
    """One reward: an entry of `rewards` in the config, made by its built-in or its function."""

    name: str

    def check(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Raise `RewardError` before anything is loaded if this machine or these rows (dataset
        columns) cannot be judged. Called outside of any event loop, with the rows that this reward
        applies to."""
        ...

    async def open(self) -> None: ...

    async def score(
        self, samples: Sequence[RewardInput], *, timeout_s: float | None = None
    ) -> list[Scored | Failed | None]:
        """Judge as `Reward.score` does; the verdict is None where this reward does not apply to a
        sample. Answers within its limit plus one second whatever the sample, or a worker, does."""
        ...

    def outage(self) -> str | None: ...

    async def close(self) -> None: ...


Shape = Literal["auto", "trl", "verl", "openrlhf", "areal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """One reward (an entry of `rewards`)."""

    function: str
    """`module:function` or `file.py:function`, run in worker processes of its own; or the name of a
    built-in: reasoning_gym, math, code, judge, reward_model. `<python>:name` stands for an object
    that a program gave to `rollpacker.train`, and only there."""
    tasks: tuple[str, ...] | None = None
    """Judge only rows whose task column (`data.*.task_column`) has one of these values. None:
    every row."""
    weight: float = 1.0
    timeout_s: float = 60.0
    """A call that takes longer is given up: no verdict. Built-ins with a `deadline` go by that."""
    name: str | None = None
    """The reward's name in metrics. None: the function's own name."""
    shape: Shape = "auto"
    """The framework whose way of calling the function expects. auto: told by its signature."""
    max_failed_calls: int | None = 32
    """A function that gives no sample a verdict in so many calls in a row (it raises, overruns,
    returns what is no number) ends the run, resumable. Lost workers, endpoints that are down and
    what the sandbox does are not counted. None: never."""
    workers: int | Literal["auto"] = "auto"
    """Checks at a time, each in a worker of its own; more are started as work waits. auto: one per
    processor (judge: 16 requests)."""
    deadline: AdaptiveDeadlineConfig | None = None
    """Adaptive limit of each check. None: the built-in's own default; plain functions have
    `timeout_s` alone."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments for the function or the built-in."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ValueError(f"weight must be a number, not {self.weight}")
        if not self.timeout_s > 0:
            raise ValueError("timeout_s must be more than 0")
        if self.workers != "auto" and self.workers < 1:
            raise ValueError(f"workers must be at least 1, or auto, not {self.workers}")
        if self.max_failed_calls is not None and self.max_failed_calls < 1:
            raise ValueError(f"max_failed_calls must be at least 1, not {self.max_failed_calls}")
        if self.tasks is not None and not self.tasks:
            raise ValueError("tasks must name at least one task; leave it out to judge every row")
