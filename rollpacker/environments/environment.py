"""The environment protocols and the records that cross them. Light.

controller -> Environments (all of a run) -> a process of environments -> a user's Environment
                                                                       -> functions that are tools
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollpacker.core.ids import SampleId

Message = Mapping[str, Any]
"""As chat templates take it: `role`, `content`, and of an assistant `tool_calls`, of a tool
`tool_call_id` and `name`. Plain values only."""
ToolSchema = Mapping[str, Any]
"""A tool as chat templates take it: `{"type": "function", "function": {name, description,
parameters}}`."""


class EnvironmentSetupError(RuntimeError):
    """Environments are set up wrongly (not: one failed in an episode, which is `Lost`)."""


class Environment(Protocol):
    """What a user writes: a class, made anew for each episode, whose methods may be async."""

    def reset(self, row: Mapping[str, Any]) -> Sequence[Message] | None:
        """Begin. `row`: the dataset row's columns, and `seed`, which is the prompt's: all episodes
        of a prompt begin alike. What it returns is the prompt; None: the row's own prompt is."""
        ...

    def step(self, message: Message) -> tuple[Sequence[Message], float | None, bool]:
        """Answer the model's message: what is said to the model, a reward for this turn or None,
        and whether the episode is over. Gymnasium's five values are taken, too."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """An episode is open."""

    messages: tuple[Message, ...] | None
    """The prompt. None: the row's own."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What an environment made of one message of the model."""

    messages: tuple[Message, ...]
    """For the model; may be empty where the episode is over."""
    reward: float | None = None
    """Of this turn."""
    done: bool = False
    truncated: bool = False
    """It ended for a limit of its own, rather than by what happened."""
    seconds: float = 0.0
    """In the environment, without any waiting."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Such as tool calls and failed ones, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The episode cannot go on. Never a zero."""

    reason: str
    cause: str
    """"environment" (it raised, or broke the protocol: another try would do the same), "deadline"
    (it was too slow), "infrastructure" (its process died or hung) or "cancelled"."""
    seconds: float = 0.0


class Environments(Protocol):
    """All environments of a run, as the controller sees them. One event loop."""

    tools: tuple[ToolSchema, ...]
    """What the model is told of; the same for every episode."""
    begins: bool
    """Episodes have to be begun before their first turn, since environments say the prompt. False:
    `begin` may be left out; the row's prompt is the prompt."""
    is_deterministic: bool
    """The same actions bring the same answers: a lost episode can be played again."""

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
    ) -> Begun | Lost: ...

    async def act(
        self, episode: SampleId, turn: int, message: Message, *, timeout_s: float | None = None
    ) -> Answered | Lost:
        """Give the model's message of this turn, counted from 1, to the episode. Never raises for
        what an environment did. Cancelling the call gives the episode up."""
        ...

    def end(self, episode: SampleId) -> None:
        """Nobody needs the episode any more. Idempotent; returns at once."""
        ...

    async def close(self) -> None:
        """End every process; nothing is left behind."""
        ...
