"""The environment protocols and the records that cross them. Light.

controller -> Environments (all of a run) -> a process of environments -> a user's Environment
                                                                       -> functions that are tools
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from rollpacker.core.events import ToolCall
from rollpacker.core.ids import SampleId

Message = Mapping[str, Any]
"""A message as chat templates have it: `role`, `content`, and of an assistant `tool_calls`, of a
tool `tool_call_id` and `name`. Plain values only. Texts that looked like calls and could not be
read are in `malformed_tool_calls` of the assistant's message."""
ToolSchema = Mapping[str, Any]
"""A tool as chat templates take it: `{"type": "function", "function": {name, description,
parameters}}`."""


class EnvironmentSetupError(RuntimeError):
    """Environments are set up wrongly. An environment that failed in an episode is a `Lost`
    instead."""


SANDBOX_TOOLS = ("python", "shell")
"""Our own tools, which run what a model wrote in the sandbox."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentConfig:
    """The environment that answers the model between its turns (`environment.*`)."""

    tools: tuple[str, ...] = ()
    """Functions with type hints and a docstring, as `module:function` or `file.py:function`; and
    `python` and `shell`, which run what the model wrote in the sandbox, in a folder that each
    episode has for itself."""
    function: str | None = None
    """An environment: a class with `reset` and `step`, or a function that makes one, as
    `module:Class` or `file.py:Class`; or `gem:NAME`, `verifiers:NAME` and so on; or
    `program:COMMAND`, a program that talks to the policy as to OpenAI's API. Instead of `tools`."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments that `function` is called with, for each episode."""
    rewrites: Literal["refuse", "prefixes"] = "refuse"
    """A chat template that rewrites earlier turns (drops thinking once a user speaks, say). refuse:
    the run does not start. prefixes: each turn is drawn behind what the template makes of all
    messages before it, and trained on so, in a row of its own where that is not what came before
    with more behind it. Other templates know no difference."""
    max_turns: int = 10
    """Turns of the model in one episode."""
    max_trajectory_tokens: int | None = None
    """Tokens of all turns and answers together, without the prompt. None: as many as the model's
    context allows."""
    max_environment_s: float | None = None
    """Seconds that one episode may spend in its environment. None: no limit."""
    timeout_s: float = 60.0
    """An answer that takes longer ends the episode; it is never worth a zero."""
    workers: int | Literal["auto"] = "auto"
    """Processes of environments, each with many episodes. auto: one per processor, at most 8."""
    per_host: int | None = None
    """Processes of environments beside the engines of each host, with `runtime=ray`, instead of
    `workers` beside the run's own process. None: all of them are beside the run's own."""
    memory_mb: int | None = None
    """Memory in MiB that one process may have beyond what it took to load. More raises
    `MemoryError` in the environment. None: no limit."""
    max_result_chars: int = 16384
    """Characters of a tool's result. Longer results are cut, with a note for the model."""
    deterministic: bool | None = None
    """Whether the same actions bring the same answers, so that a lost episode can be played again.
    None: as the environment, or each of the tools, says itself by an attribute `deterministic`;
    false if it says nothing."""

    def __post_init__(self) -> None:
        if self.tools and self.function is not None:
            raise ValueError(
                "tools and function cannot both be set: an environment brings tools of its own"
                " (an attribute `tools`)"
            )
        if self.arguments and self.function is None:
            raise ValueError("arguments are those of function, which is not set")
        for name in ("max_turns", "max_trajectory_tokens", "memory_mb"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        for name in ("max_environment_s", "timeout_s"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be more than 0, not {value}")
        if self.workers != "auto" and self.workers < 1:
            raise ValueError(f"workers must be at least 1, or auto, not {self.workers}")
        if self.per_host is not None and (self.per_host < 1 or self.workers != "auto"):
            raise ValueError(
                f"per_host must be at least 1, and takes the place of workers, not {self.per_host}"
                f" with workers={self.workers}"
            )
        if self.max_result_chars < 100:
            raise ValueError(f"max_result_chars must be at least 100, not {self.max_result_chars}")


class Environment(Protocol):
    """An environment as a user writes it: a class, made anew for each episode, whose methods may be
    async.

    It may have, besides: `tools` (schemas), which the model is told of, in an episode those that
    `reset` sets if it sets any; `deterministic = True`; `rows()`, the rows of a data set of kind
    environment; and `close()`. Blocking methods of an episode run in a thread of its own, always
    the same, beside those of other episodes; async ones in one event loop. What else is taken
    (Gymnasium's methods, TRL's environments): `shapes.py`.
    """

    def reset(self, row: Mapping[str, Any]) -> Sequence[Message] | None:
        """Begin. `row`: the dataset row's columns, its prompt too, and `seed` (unless the row has
        one), which is the prompt's: all episodes of a prompt begin alike. What it returns is the
        prompt; None: the row's own prompt is."""
        ...

    def step(self, message: Message) -> tuple[Sequence[Message], float | None, bool]:
        """Answer the model's message: what is said to the model, a reward for this turn or None,
        and whether the episode is over. Gymnasium's five values are taken, too. A text instead of
        messages is the user's."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """An episode is open."""

    messages: tuple[Message, ...] | None
    """The prompt. None: the row's own."""
    tools: tuple[ToolSchema, ...] | None = None
    """Schemas of the tools that the model is told of in this episode. None: those of every
    episode."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The answer of an environment to one message of the model."""

    messages: tuple[Message, ...]
    """Messages for the model. May be empty where the episode is over."""
    reward: float | None = None
    """The reward of this turn. None: there is none."""
    done: bool = False
    truncated: bool = False
    """Whether the episode ended for a limit of its own, rather than by what happened."""
    seconds: float = 0.0
    """Seconds in the environment, without any waiting."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers such as tool calls and failed ones, by name."""
    calls: tuple[ToolCall, ...] = ()
    """The calls of tools, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """The whole dialogue of an episode and its rewards, for reward functions and for people."""

    prompt: tuple[Message, ...] | None = None
    """The prompt as the environment said it. None: it is the row's own prompt."""
    messages: tuple[Message, ...]
    """All messages behind the prompt: the model's and the environment's, by turns."""
    rewards: tuple[float | None, ...] = ()
    """The environment's, by turn; None where it gave none. A turn that was cut off has none."""
    num_drawn: tuple[int, ...] = ()
    """Tokens that the model drew, by turn."""
    environment_s: float = 0.0
    answer_s: tuple[float, ...] = ()
    """Seconds of the environment, by turn."""
    policy_s: tuple[float, ...] = ()
    """Seconds from asking for a turn to its last token, by turn."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Sums of the answers' metrics over turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The episode cannot go on. Never a zero."""

    reason: str
    cause: str
    """"environment" (it raised, or broke the protocol: another try would do the same), "deadline"
    (it was too slow), "infrastructure" (its process died or hung), "prompt" (the prompt that it
    said is too long: so it is for each sample of the prompt) or "cancelled"."""
    seconds: float = 0.0
    calls: tuple[ToolCall, ...] = ()
    """The calls of tools, in order, of an environment that was too slow: the last one had not
    ended. Empty: none ran, or nobody knows which."""


class Environments(Protocol):
    """All environments of a run, as the controller sees them. One event loop."""

    tools: tuple[ToolSchema, ...]
    """Schemas of the tools that the model is told of, unless an episode has tools of its own
    (`Begun`)."""
    begins: bool
    """Episodes have to be begun before their first turn, since environments say the prompt. False:
    `begin` may be left out; the row's prompt is the prompt."""
    is_deterministic: bool
    """Whether the same actions bring the same answers, so that a lost episode can be played
    again."""
    scores_at_end: bool
    """Whether each episode has one reward, with the answer that ends it. An episode that a limit
    ends is asked for its reward (`finish`)."""

    async def open(self) -> None:
        """Start processes in the running loop. Raises `EnvironmentSetupError` for what the user can
        mend."""
        ...

    async def begin(
        self,
        episode: SampleId,
        row: Mapping[str, Any],
        *,
        seed: int,
        timeout_s: float | None = None,
    ) -> Begun | Lost:
        """Open the episode. One that has played already begins anew: if the environments are
        deterministic and one then answers otherwise than before, that is `Lost`
        ("environment")."""
        ...

    async def act(
        self, episode: SampleId, turn: int, message: Message, *, timeout_s: float | None = None
    ) -> Answered | Lost:
        """Give the model's message of this turn, counted from 1, to the episode. The same turn
        again has the same answer. Never raises for what an environment did. Cancelling the call
        gives the episode up, and so does a `Lost`: `begin` begins it anew."""
        ...

    async def finish(
        self, episode: SampleId, *, timeout_s: float | None = None
    ) -> float | Lost | None:
        """The reward, besides those that it has given, of an episode that a limit has ended. None:
        nothing. As `act` in all else."""
        ...

    def end(self, episode: SampleId) -> None:
        """Forget the episode, which nobody needs any more. Idempotent; returns at once. A call that
        still waits for its answer gets `Lost` ("cancelled")."""
        ...

    async def close(self) -> None:
        """End every process; nothing is left behind."""
        ...
