"""Tools: plain functions, their schemas for the model, and the execution of the model's calls.

Runs in a worker process; the run's own process never imports a tool.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, get_args, get_type_hints

from rollpacker.core.events import ToolCall
from rollpacker.environments.environment import EnvironmentSetupError, Message, ToolSchema
from rollpacker.rewards.functions.returned import shortened

Function = Callable[..., Any]
Call = Callable[..., Awaitable[Any]]
"""Function that calls a user's function (its first argument), blocking or async, with the arguments
that follow and returns the result."""


class ToolFailed(Exception):
    """A call of the tool `python` or `shell` failed. The message is shown to the model."""


class ToolUnavailable(Exception):
    """A tool cannot be used at all at the moment, whatever the call. The episode is lost."""


_HINTS = (
    "A model gives plain values: use str, int, float, bool, list, dict, Literal or unions of them;"
    " in place of a dataclass or TypedDict a dict, or each of its fields as a parameter."
)
_NO_DESCRIPTION = re.compile(r"no description for the argument '(\w+)'")
_MAX_ERROR = 500
_WRONG_KINDS = {
    inspect.Parameter.VAR_POSITIONAL: "*{}",
    inspect.Parameter.VAR_KEYWORD: "**{}",
    inspect.Parameter.POSITIONAL_ONLY: "{} by position only",
}


def schema_of(function: Function, name: str) -> ToolSchema:
    """The schema of a function for chat templates, from its type hints and its docstring. Raises
    `EnvironmentSetupError` for the first mistake, with `name` in the message."""
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    if not (inspect.isfunction(function) or inspect.ismethod(function)):
        kind = type(function).__name__
        raise EnvironmentSetupError(f"tool {name} is a {kind}, not a function; write a function.")
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in _WRONG_KINDS:
            taken = _WRONG_KINDS[parameter.kind].format(parameter.name)
            raise EnvironmentSetupError(
                f"tool {name} takes {taken}; a model gives every argument by its name, so each"
                " must be a parameter with a name and a type hint."
            )
        if parameter.annotation is inspect.Parameter.empty:
            raise EnvironmentSetupError(
                f'tool {name}: its parameter "{parameter.name}" has no type hint; the model is told'
                f" what to give by it. Write {parameter.name}: str, or whatever it is."
            )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise EnvironmentSetupError(f"tool {name} is a generator; return a list instead.")
    _refuse_enums(function, name)
    if not inspect.getdoc(function):
        raise EnvironmentSetupError(
            f"tool {name} has no docstring; it tells the model what the tool does."
        )
    try:
        return get_json_schema(function)
    except DocstringParsingException as error:
        found = _NO_DESCRIPTION.search(str(error))
        if found is None:
            raise EnvironmentSetupError(f"tool {name}: {error}") from None
        raise EnvironmentSetupError(
            f'tool {name}: its docstring does not say what "{found[1]}" is. Write below its text:'
            f" a line Args: and below that {found[1]}: and what it is, further in."
        ) from None
    except TypeHintParsingException as error:
        told = str(error).partition(". ")[0].partition(", likely")[0]
        raise EnvironmentSetupError(f"tool {name}: {told}. {_HINTS}") from None
    except (NameError, TypeError) as error:
        raise EnvironmentSetupError(f"tool {name}: its type hints: {error}") from None


def _refuse_enums(function: Function, name: str) -> None:
    try:
        hints = get_type_hints(function)
    except (NameError, TypeError):  # which who makes the schema says better
        return
    for parameter, hint in hints.items():
        found = next((one for one in _within(hint) if issubclass(one, Enum)), None)
        if found is not None and parameter != "return":
            values = ", ".join(repr(one.value) for one in found)
            raise EnvironmentSetupError(
                f'tool {name}: its parameter "{parameter}" is the Enum {found.__name__}, and a'
                f" model gives plain values. Write Literal[{values}], and make the Enum of it"
                " inside."
            )


def _within(hint: Any) -> Iterator[type]:
    """Yield the classes that a type hint is made of."""
    if isinstance(hint, type) and not get_args(hint):
        yield hint
    for one in get_args(hint):
        yield from _within(one)


def named(functions: Sequence[tuple[str, Function]]) -> dict[str, Function]:
    """The functions by the names that the model uses. `functions`: pairs of the name in the config
    and the function. Raises `EnvironmentSetupError` for equal names."""
    found: dict[str, Function] = {}
    for spec, function in functions:
        name = getattr(function, "__name__", spec)
        if name in found:
            raise EnvironmentSetupError(
                f'two tools are called "{name}"; {spec} is the second. Rename one of them.'
            )
        found[name] = function
    return found


class ToolBox:
    """The tools of one episode. Executes the calls in the model's messages."""

    def __init__(self, tools: Mapping[str, Function], call: Call, max_chars: int) -> None:
        self._tools = tools
        self._call = call
        self._max_chars = max_chars
        self._made: list[ToolCall] = []
        """Records of the tool calls of the model's latest message that are done."""
        self._runs: tuple[str, float] | None = None
        """Name of the tool that runs now, and the time at which it began. None: no tool runs."""

    def under_way(self) -> tuple[ToolCall, ...]:
        """The tool calls so far of the message being answered. Empty: no tool runs."""
        if self._runs is None:
            return ()
        tool, began = self._runs
        seconds = round(time.perf_counter() - began, 6)
        return (*self._made, ToolCall(tool, seconds, is_well=False))

    async def answer(self, message: Message) -> dict[str, Any]:
        """Execute the calls of a message, one after another. Returns `messages` for the model (one
        per call), `done` (whether there were no calls), `metrics` and `calls`. Calls that could not
        be read are reported in a user's message, or at the end of the last answer: a tool's message
        must belong to a call, and templates refuse others."""
        calls = message.get("tool_calls") or ()
        malformed = message.get("malformed_tool_calls") or ()
        answers: list[dict[str, Any]] = []
        made = self._made = []
        for call in calls:
            answer, of_tool = await self._one(call)
            answers.append(answer)
            made.append(of_tool)
        if malformed:
            told = "\n".join(map(self._unread, malformed))
            if answers:
                answers[-1]["content"] += f"\n{told}"
            else:
                answers.append({"role": "user", "content": told})
        metrics = {
            "tools/calls": float(len(calls)),
            "tools/failed": float(sum(not of_tool.is_well for of_tool in made)),
            "tools/malformed": float(len(malformed)),
        }
        return {"messages": answers, "done": not answers, "metrics": metrics, "calls": made}

    def _unread(self, text: Any) -> str:
        known = ", ".join(self._tools)
        return (
            f"Error: this tool call cannot be read: {shortened(str(text))}. A call names one of the"
            f" tools ({known}) and gives its arguments as a JSON object."
        )

    async def _one(self, call: Any) -> tuple[dict[str, Any], ToolCall]:
        """Execute one call. Returns the answer (or error) for the model, and a record."""
        asked = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(asked, Mapping):
            asked = {}
        name = str(asked.get("name", ""))
        answer: dict[str, Any] = {"role": "tool", "name": name}
        if isinstance(call, Mapping) and call.get("id") is not None:
            answer["tool_call_id"] = call["id"]
        try:
            function, arguments = self._understood(name, asked.get("arguments", {}))
        except ValueError as error:
            known = name if name in self._tools else ""
            return answer | {"content": f"Error: {error}"}, ToolCall(known, None, is_well=False)
        began, is_well = time.perf_counter(), True
        self._runs = name, began
        try:
            result = await self._call(function, **arguments)
            content = self._cut(result if isinstance(result, str) else _as_json(result))
        except ToolUnavailable:
            raise
        except Exception as error:
            content, is_well = f"Error: {_said(error)}", False
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise  # nobody waits for this episode any more
            content, is_well = f"Error: {_said(error)}", False
        finally:
            self._runs = None
        seconds = round(time.perf_counter() - began, 6)
        return answer | {"content": content}, ToolCall(name, seconds, is_well)

    def _understood(self, name: str, arguments: Any) -> tuple[Function, dict[str, Any]]:
        """A call's function and arguments. Raises `ValueError` with a message for the model."""
        function = self._tools.get(name)
        if function is None:
            raise ValueError(f'there is no tool "{name}"; there are: {", ".join(self._tools)}.')
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError as error:
                raise ValueError(f"the arguments of {name} are not JSON: {error}.") from None
        if not isinstance(arguments, Mapping):
            raise ValueError(f"the arguments of {name} must be a JSON object.")
        signature = inspect.signature(function)
        try:
            signature.bind(**arguments)
        except TypeError as error:
            takes = ", ".join(signature.parameters) or "no arguments"
            raise ValueError(f"{name}: {error}; it takes {takes}.") from None
        return function, dict(arguments)

    def _cut(self, text: str) -> str:
        if len(text) <= self._max_chars:
            return text
        kept = text[: self._max_chars]
        return f"{kept}\n[cut here: {len(text) - self._max_chars} more characters]"


def _as_json(value: Any) -> str:
    """A tool's result as JSON text; what JSON cannot express (such as keys that are tuples) as
    Python prints it."""
    try:
        return json.dumps(value, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError):
        return str(value)


def _plain(value: Any) -> Any:
    """A value for JSON: numbers and arrays of numpy and torch as numbers and lists, all else as
    text."""
    tolist = getattr(value, "tolist", None)
    return tolist() if callable(tolist) else str(value)


def _said(error: BaseException) -> str:
    try:
        said = str(error)
    except Exception:  # a __str__ of the user's own
        said = ""
    if isinstance(error, ToolFailed):
        return said
    if len(said) > _MAX_ERROR:
        said = said[: _MAX_ERROR - 3] + "..."
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
