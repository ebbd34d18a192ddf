"""The environment protocols and the records passed through them. Imports nothing heavy.

controller -> Environments (all of a run) -> a process of environments -> a user's Environment
                                                                       -> functions that are tools
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from rollpacker.bounds import check_at_least, check_positive
from rollpacker.core.events import ToolCall
from rollpacker.core.ids import SampleId

Message = Mapping[str, Any]
"""A message as chat templates have it: `role` and `content`; an assistant's may have `tool_calls`,
a tool's has `tool_call_id` and `name`. All values are plain. Texts that looked like calls and could
not be read are in `malformed_tool_calls` of the assistant's message."""
ToolSchema = Mapping[str, Any]
"""A tool as chat templates expect it: `{"type": "function", "function": {name, description,
parameters}}`."""


class EnvironmentSetupError(RuntimeError):
    """Environments are set up wrongly. (An environment that fails in an episode is a `Lost`.)"""


SANDBOX_TOOLS = ("python", "shell")
"""Names of our own tools, which run the model's code in the sandbox."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentConfig:
    """The environment that answers the model between its turns (`environment.*`)."""

    tools: tuple[str, ...] = ()
    """Tools of the model: functions with type hints and a docstring, as `module:function` or
    `file.py:function`; and `python` and `shell`, which run the model's code in the sandbox, in a
    folder that each episode has for itself."""
    function: str | None = None
    """The environment: a class with `reset` and `step`, or a function that makes one, as
    `module:Class` or `file.py:Class`; or `gem:NAME`, `verifiers:NAME` and so on; or
    `program:COMMAND`, a program that uses the policy through OpenAI's API. Cannot be set together
    with `tools`. None: `tools` alone, if any."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments with which `function` is called for each episode."""
    rewrites: Literal["refuse", "prefixes"] = "refuse"
    """What to do with a chat template that rewrites earlier turns (for example drops thinking once
    a user speaks). refuse: the run does not start. prefixes: each turn is generated behind what the
    template makes of all messages before it, and trained on in the same way, as a sequence of its
    own where that does not continue the one before. For other templates both are the same."""
    max_turns: int = 10
    """Most turns of the model in one episode."""
    max_trajectory_tokens: int | None = None
    """Most tokens of all turns and answers together, without the prompt. None: as many as the
    model's context allows."""
    max_environment_s: float | None = None
    """Most seconds that one episode may spend in its environment. None: no limit."""
    timeout_s: float = 60.0
    """Seconds for one answer of an environment. If it takes longer, the episode is lost, which
    never counts as a reward of zero."""
    workers: int | Literal["auto"] = "auto"
    """Number of environment processes, each with many episodes. auto: one per processor, at most
    8."""
    per_host: int | None = None
    """Number of environment processes beside the engines of each host, with `runtime=ray`, instead
    of `workers` processes beside the run's own. None: all are beside the run's own process."""
    memory_mb: int | None = None
    """Memory in MiB that one environment process may use beyond what it took to load. More raises
    `MemoryError` in the environment. None: no limit."""
    max_result_chars: int = 16384
    """Most characters of a tool's result. A longer result is cut, with a note for the model."""
    deterministic: bool | None = None
    """Whether the same actions lead to the same answers, so that a lost episode can be played
    again. None: as the environment, or every tool, declares in an attribute `deterministic`; false
    without one."""

    def __post_init__(self) -> None:
        if self.tools and self.function is not None:
            raise ValueError(
                "tools and function cannot both be set: an environment brings tools of its own"
                " (an attribute `tools`)"
            )
        if self.arguments and self.function is None:
            raise ValueError("arguments are those of function, which is not set")
        check_at_least(self, 1, "max_turns", "max_trajectory_tokens", "memory_mb")
        check_positive(self, "max_environment_s", "timeout_s")
        check_at_least(self, 1, "workers", otherwise="auto")
        if self.per_host is not None and (self.per_host < 1 or self.workers != "auto"):
            raise ValueError(
                f"per_host must be at least 1, and takes the place of workers, not {self.per_host}"
                f" with workers={self.workers}"
            )
        check_at_least(self, 100, "max_result_chars")


class Environment(Protocol):
    """An environment as a user writes it: a class whose methods may be async. There is a new
    instance for each episode.

    It may also have `tools` (schemas to show to the model; those that `reset` sets are for that
    episode), `deterministic = True`, `rows()` (the rows of a data set of kind environment) and
    `close()`. Blocking methods of an episode run in one thread of its own, async methods in one
    event loop. Other forms that are accepted (Gymnasium's methods, TRL's environments):
    `shapes.py`.
    """

    def reset(self, row: Mapping[str, Any]) -> Sequence[Message] | None:
        """Begin an episode and return its prompt. None: the row's own prompt is used. `row`: the
        dataset row's columns, with its prompt and with `seed` (unless the row has one), which is
        the same for all episodes of a prompt."""
        ...

    def step(self, message: Message) -> tuple[Sequence[Message], float | None, bool]:
        """Answer the model's message. Returns messages for the model, a reward for this turn or
        None, and whether the episode is over. Gymnasium's five values are accepted, too, and a text
        for a user's message."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """The reply of an environment to the beginning of an episode."""

    messages: tuple[Message, ...] | None
    """The episode's prompt. None: the dataset row's own prompt."""
    tools: tuple[ToolSchema, ...] | None = None
    """Schemas of the tools that the model is shown in this episode. None: the same tools as in
    every episode."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The answer of an environment to one message of the model."""

    messages: tuple[Message, ...]
    """Messages for the model. May be empty if the episode is over."""
    reward: float | None = None
    """The environment's reward for this turn. None: it gave none."""
    done: bool = False
    truncated: bool = False
    """Whether the episode was ended by a limit of the environment, not by what happened in it."""
    seconds: float = 0.0
    """Seconds that the environment's functions took for this answer; waiting is not counted."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers for the logs, by name, such as those of tool calls and failed tool calls."""
    calls: tuple[ToolCall, ...] = ()
    """The tool calls of this turn, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """The whole dialogue of an episode with its rewards, for reward functions and for display."""

    prompt: tuple[Message, ...] | None = None
    """The prompt that the environment gave. None: the dataset row's own prompt was used."""
    messages: tuple[Message, ...]
    """All messages after the prompt: those of the model and of the environment, by turns."""
    rewards: tuple[float | None, ...] = ()
    """Rewards of the environment, by turn; None where it gave none. There is no entry for a turn
    that was cut off."""
    num_drawn: tuple[int, ...] = ()
    """Number of tokens that the model generated, by turn."""
    environment_s: float = 0.0
    answer_s: tuple[float, ...] = ()
    """Seconds spent in the environment, by turn."""
    policy_s: tuple[float, ...] = ()
    """Seconds from the request for a turn to its last token, by turn."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Sums of the metrics of the environment's answers over all turns, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The reply if the episode cannot go on. It is never counted as a reward of zero."""

    reason: str
    cause: str
    """Cause of the loss: "environment" (it raised or broke the protocol, as another try would),
    "deadline" (it was too slow), "infrastructure" (its process died or hung), "prompt" (its prompt
    is too long, as for every sample of the prompt) or "cancelled"."""
    seconds: float = 0.0
    calls: tuple[ToolCall, ...] = ()
    """The tool calls of the turn, in order, if the environment was too slow; the last had not
    ended. Empty: no tool ran, or that is not known."""


class Environments(Protocol):
    """All environments of a run, as the run's own process uses them, in one event loop."""

    tools: tuple[ToolSchema, ...]
    """Schemas of the tools that the model is shown, unless an episode has its own (`Begun`)."""
    begins: bool
    """Whether each episode must be begun before its first turn, since the environment gives the
    prompt. False: `begin` may be left out, and the dataset row's prompt is used."""
    is_deterministic: bool
    """Whether the same actions lead to the same answers, so that a lost episode can be played
    again."""
    scores_at_end: bool
    """Whether each episode has a single reward, which comes with the answer that ends it. If a
    limit of the run (such as of turns) ends the episode, `finish` returns the reward."""

    async def open(self) -> None:
        """Start processes, in the running event loop. Raises `EnvironmentSetupError` for mistakes
        that the user can correct."""
        ...

    async def begin(
        self,
        episode: SampleId,
        row: Mapping[str, Any],
        *,
        seed: int,
        timeout_s: float | None = None,
    ) -> Begun | Lost:
        """Begin the episode, also again. `row`: the prompt's dataset row, to which `seed` is added.
        `timeout_s`: a limit below the config's; None: the config's. Where deterministic
        environments answer otherwise than before, returns a `Lost` with cause "environment"."""
        ...

    async def act(
        self, episode: SampleId, turn: int, message: Message, *, timeout_s: float | None = None
    ) -> Answered | Lost:
        """Give the episode the model's message of this turn, counted from 1, and return the answer.
        Repeating a turn repeats the answer. What goes wrong in an environment is returned as a
        `Lost`, not raised. After a `Lost`, or a cancelled call, the episode must be begun again."""
        ...

    async def finish(
        self, episode: SampleId, *, timeout_s: float | None = None
    ) -> float | Lost | None:
        """Return the reward at the end (`scores_at_end`) of an episode that a limit of the run
        ended. None: there is none beyond those of its turns. Errors are as in `act`."""
        ...

    def end(self, episode: SampleId) -> None:
        """Forget the episode. Idempotent; returns at once. A call that still waits for its answer
        gets `Lost` with the cause "cancelled"."""
        ...

    async def close(self) -> None:
        """End all environment processes."""
        ...
