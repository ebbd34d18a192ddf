"""The reward protocols and the records passed through them. Imports nothing heavy.

controller -> Reward (routes, weights, sums) -> RewardPart (one reward) -> a worker, a sandbox,
                                                                           an endpoint
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple, Protocol

from rollpacker.bounds import check_at_least, check_positive
from rollpacker.core.checks.deadlines import AdaptiveDeadlineConfig
from rollpacker.environments.environment import Episode


class RewardError(RuntimeError):
    """A reward is set up wrongly. (A reward that fails on a sample is a `Failed`.)"""


class Progress(NamedTuple):
    """How far a run is: `steps_done` of `num_steps`, for rewards that change during a run."""

    steps_done: int = 0
    num_steps: int = 1
    """Number of steps of the whole run."""


UNKNOWN = Progress()


class TurnRewards(NamedTuple):
    """The rewards of a trajectory's turns, in order, with each turn's number of tokens."""

    num_drawn: tuple[int, ...]
    """Number of tokens that the model generated in each turn."""
    values: tuple[float, ...]
    """Reward of each turn alone, without the rewards of later turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardInput:
    """One sample as rewards see it."""

    prompt: str | list[dict[str, str]]
    """The prompt as in the dataset: text or chat messages. Reward functions get the completion in
    the same form, or the whole dialogue if there is an `episode`."""
    completion: str
    """The response, decoded without special tokens."""
    completion_tokens: tuple[int, ...]
    finish_reason: str
    columns: Mapping[str, Any]
    """The dataset row's other columns."""
    task: str | None = None
    """Value of the row's task column, by which rewards choose their samples. None: it has no
    task."""
    messages: list[dict[str, str]] | None = None
    """The chat messages of which the chat template made the prompt. None: no template was used."""
    progress: Progress = UNKNOWN
    """How far the run was when the sample was sent to be judged."""
    episode: Episode | None = None
    """The dialogue of a sample of several turns. `completion` and its tokens are then the last
    message, and `prompt` is the environment's first message if there was one. None: the sample is a
    single response."""

    @property
    def asked(self) -> str | list[dict[str, str]]:
        """The question in the form in which the model got it: the prompt's messages if there are
        any, else the prompt. Judges and reward models use this."""
        return self.prompt if self.messages is None else self.messages


class Cause(StrEnum):
    """Why a sample has no verdict."""

    SAMPLE = "sample"
    """This response cannot be judged: a reply was unreadable, or a reward raised an error on it.
    Judging it again would not help."""
    DEADLINE = "deadline"
    """The reward did not answer in time."""
    INFRASTRUCTURE = "infrastructure"
    """The response was not the reason: a worker died or hung, or an endpoint was down. The sample
    is judged once more, on another worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    value: float
    parts: Mapping[str, float | None] = field(default_factory=dict)
    """The value of each reward, by name. None: the reward does not apply to the sample."""
    turns: tuple[float, ...] = ()
    """Parts of the value that the turns of a trajectory earned; their sum is the value. Empty: the
    value is for the trajectory as a whole, and is the last turn's reward."""
    seconds: float | None = None
    """Execution time in seconds, without any waiting, from which adaptive deadlines learn; for a
    program with several tests that of the slowest. None: the caller measures the time."""
    correct: bool | None = None
    """Whether the answer is right; adaptive deadlines learn from the times of right answers. None:
    it is right if the value is above 0."""
    timed_out: bool = False
    """Whether the answer exceeded its time limit, for which it counts as wrong."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers that the reward logged in the call that judged this sample, by name."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Values that the reward logged for this sample, by column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The record of a sample that has no verdict, with the reason. It never counts as a reward of
    zero. `seconds`: execution time, or None if unknown."""

    reason: str
    parts: Mapping[str, float | None] = field(default_factory=dict)
    cause: Cause = Cause.SAMPLE
    seconds: float | None = None


class Reward(Protocol):
    """All rewards of a run together, which judge in the run's process or on other hosts."""

    names: tuple[str, ...]
    """Names of the individual rewards, in the order of the config."""

    async def open(self) -> None:
        """Start workers in the running event loop. The first call of `score` does so, too."""
        ...

    async def score(
        self, samples: Sequence[RewardInput], *, timeout_s: float | None = None
    ) -> list[Scored | Failed]:
        """Judge a batch, and return one verdict per sample in the same order. Nothing that a sample
        or a function does raises an error. `timeout_s` limits each single check (for a program:
        each test) and replaces the reward's own limit. Cancelling the call ends its checks."""
        ...

    def outage(self) -> str | None:
        """Describe the outage of an external service that rewards wait for. None: no outage."""
        ...

    def broken(self) -> str | None:
        """The reason why rewards give no verdicts any more, in words. None: they still do."""
        ...

    def metrics(self) -> dict[str, float]:
        """Counts since the start of the run (such as of retries), by names `REWARD/COUNT`. Rewards
        that count nothing are not in it."""
        ...

    async def close(self) -> None:
        """End all workers of the rewards."""
        ...


class RewardPart(Protocol):
    """One reward: an entry of `rewards` in the config, built in or made of a function."""

    name: str

    def check(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Raise `RewardError` if this machine cannot run the reward, or these rows (mappings of
        dataset columns) cannot be judged. Called before anything is loaded, outside of any event
        loop, with the rows that this reward applies to."""
        ...

    async def open(self) -> None: ...

    async def score(
        self, samples: Sequence[RewardInput], *, timeout_s: float | None = None
    ) -> list[Scored | Failed | None]:
        """Judge a batch as `Reward.score` does. The verdict is None where this reward does not
        apply to a sample. Returns within the time limit plus one second, whatever happens."""
        ...

    def outage(self) -> str | None: ...

    async def close(self) -> None: ...


Shape = Literal["auto", "trl", "verl", "openrlhf", "areal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """One reward (an entry of `rewards`)."""

    function: str
    """The reward's function, as `module:function` or `file.py:function`, which runs in worker
    processes of its own; or the name of a built-in reward: reasoning_gym, math, code, judge,
    reward_model, environment. `<python>:name` stands for an object that a program gave to
    `rollpacker.train`, and is possible only there."""
    tasks: tuple[str, ...] | None = None
    """Values of the task column (`data.*.task_column`) of the rows that this reward judges. None:
    it judges every row."""
    weight: float = 1.0
    timeout_s: float = 60.0
    """Most seconds of a call. After that the sample has no verdict. Built-in rewards with a
    `deadline` use that instead."""
    name: str | None = None
    """The reward's name in metrics. None: the function's own name."""
    shape: Shape = "auto"
    """The framework in whose way the function is called. auto: the one that its signature fits."""
    max_failed_calls: int | None = 32
    """Number of calls in a row without any verdict (the function raises, takes too long, returns
    what is no number) after which the run ends and can be resumed. Calls that fail for lost
    workers, endpoints that are down or the sandbox do not count. None: the run never ends for
    it."""
    workers: int | Literal["auto"] = "auto"
    """Most checks at a time, each in a worker of its own; more are started while samples wait.
    auto: one per processor (judge: 16 requests)."""
    deadline: AdaptiveDeadlineConfig | None = None
    """Adaptive time limit of each check. None: the built-in reward's own default; functions then
    have `timeout_s` alone."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments for the function or the built-in."""

    @property
    def takes_device(self) -> bool:
        """Whether the reward is a model that has a device of the run, and not the processors."""
        return self.function == "reward_model" and self.arguments.get("device") != "cpu"

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ValueError(f"weight must be a number, not {self.weight}")
        check_positive(self, "timeout_s")
        check_at_least(self, 1, "workers", otherwise="auto")
        check_at_least(self, 1, "max_failed_calls")
        if self.tasks is not None and not self.tasks:
            raise ValueError("tasks must name at least one task; leave it out to judge every row")
