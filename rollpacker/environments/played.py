"""Episodes as they run in a worker process: with a user's environment, or only with tools."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rollpacker.core.events import ToolCall
from rollpacker.environments import shapes
from rollpacker.environments.calls import Calls
from rollpacker.environments.environment import Message
from rollpacker.environments.tools import Function, ToolBox

Reply = dict[str, Any]
"""A reply as plain values: the fields `messages`, `tools`, `reward`, `done`, `truncated`,
`metrics`, `calls` of `Begun` or `Answered`. Fields may be missing if they have their defaults."""


class Played(Protocol):
    async def begin(self, row: Mapping[str, Any]) -> Reply: ...

    async def act(self, message: Message) -> Reply: ...

    async def finish(self) -> Reply:
        """Return the `reward` at the end of an episode that a limit of the run ended; without
        `reward`: there is none beyond those of the turns."""
        ...

    def under_way(self) -> tuple[ToolCall, ...]:
        """Return the tool calls so far of the message being answered. Empty: no tool runs."""
        ...

    async def close(self) -> None: ...


class ToolEpisode:
    """An episode with tools only: each call is answered, and a message without calls ends it."""

    def __init__(self, tools: Mapping[str, Function], calls: Calls, max_chars: int) -> None:
        self._box = ToolBox(tools, calls, max_chars)

    async def begin(self, row: Mapping[str, Any]) -> Reply:
        return {"messages": None}

    async def act(self, message: Message) -> Reply:
        return await self._box.answer(message)

    async def finish(self) -> Reply:
        return {}

    def under_way(self) -> tuple[ToolCall, ...]:
        return self._box.under_way()

    async def close(self) -> None:
        return


class UserEpisode:
    """An episode with a user's environment, of any form that `shapes.py` knows."""

    def __init__(
        self, make: Callable[[], Any], calls: Calls, max_chars: int, *, in_loop: bool
    ) -> None:
        """Prepare an episode. `max_chars`: the most characters of a tool's result. `in_loop`: call
        `make` in the event loop, since it does not block; else in the episode's thread."""
        self._make = make
        self._in_loop = in_loop
        self._calls = calls
        self._max_chars = max_chars
        self._environment: Any = None
        self._box: ToolBox | None = None

    async def begin(self, row: Mapping[str, Any]) -> Reply:
        made = self._make() if self._in_loop else await self._calls(self._make)
        environment = self._environment = made
        before = _tools_of(environment)
        args, named = shapes.reset_arguments(environment.reset, row)
        said = await self._calls(environment.reset, *args, **named)
        messages = shapes.prompt_of(said)
        if not shapes.has_step(environment):
            tools = {one.__name__: one for one in shapes.tools_of(environment)}
            self._box = ToolBox(tools, self._calls, self._max_chars)
            if isinstance(said, str) and messages is not None:
                messages = shapes.with_observation(row.get("prompt"), messages)
        of_episode = _tools_of(environment)
        if of_episode == before:
            return {"messages": messages}
        if messages is None:
            raise shapes.WrongReturn("set tools in reset and returned no prompt to go with them")
        return {"messages": messages, "tools": of_episode}

    async def act(self, message: Message) -> Reply:
        if self._box is not None:
            return await self._with_tools(self._box, message)
        step = self._environment.step
        returned = await self._calls(step, shapes.step_argument(step, message))
        return shapes.stepped(returned)._asdict()

    async def _with_tools(self, box: ToolBox, message: Message) -> Reply:
        reply = await box.answer(message)
        return reply | await self.finish() if reply["done"] else reply

    async def finish(self) -> Reply:
        if not shapes.scores_at_end(self._environment):
            return {}
        return {"reward": shapes.number(await self._calls(self._environment.get_reward))}

    def under_way(self) -> tuple[ToolCall, ...]:
        return () if self._box is None else self._box.under_way()

    async def close(self) -> None:
        close = getattr(self._environment, "close", None)
        if callable(close):
            await self._calls(close)


def _tools_of(environment: Any) -> list[Any]:
    """The schemas that the environment has now, copied since it may change its list in place. Empty
    for an environment whose methods are its tools. Raises `WrongReturn`."""
    tools = getattr(environment, "tools", None)
    if tools is None or callable(tools) or not shapes.has_step(environment):
        return []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise shapes.WrongReturn(
                'has tools of another shape than {"type": "function", "function": {"name": ...}}'
            )
    return list(tools)


def made_in_loop(make: Callable[[], Any]) -> bool:
    """Whether `make` may be called in the event loop, where it must not block. That is assumed of a
    class whose `reset` and `step` are async."""
    return all(inspect.iscoroutinefunction(getattr(make, name, None)) for name in ("reset", "step"))
