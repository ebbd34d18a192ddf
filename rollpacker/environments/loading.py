"""Loads and examines the tools or the environment that a config names. Runs in a worker process."""

from __future__ import annotations

import functools
import inspect
import json
import pickle
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from rollpacker.environments import shapes
from rollpacker.environments.calls import Calls
from rollpacker.environments.environment import SANDBOX_TOOLS, EnvironmentSetupError, ToolSchema
from rollpacker.environments.played import Played, ToolEpisode, UserEpisode, made_in_loop
from rollpacker.environments.sandbox_tools import Folder, open_box
from rollpacker.environments.tools import Function, named, schema_of
from rollpacker.imports import load_function
from rollpacker.integrations import environments as adapters
from rollpacker.integrations.environments.messages import DEFAULT_NUM_ROWS, numbered_rows
from rollpacker.rewards.functions.returned import shortened
from rollpacker.sandbox.sandbox import Sandbox


@dataclass(frozen=True, slots=True)
class Loaded:
    hello: dict[str, Any]
    """What the run's process is told of the tools or the environment: `name`, `tools`, `begins`,
    `is_deterministic`, `gives_rewards`, `scores_at_end`, and `rows` if it asked for them."""
    make: Callable[[Calls], Played]
    """Function that makes a new episode, which calls the user's functions through these `Calls`."""


async def load(request: Mapping[str, Any], stack: AsyncExitStack) -> Loaded:
    """Load the tools or the environment that a request of the run's process names. A sandbox opened
    for tools is closed with `stack`. With `describe` in the request, schemas of the tools are made,
    too, which needs slow imports. Raises what the user's modules raise, and
    `EnvironmentSetupError`, `ImportSpecError`, `MissingPackageError`, `SandboxUnavailable`."""
    if request["function"] is not None:
        return await _environment(request)
    specs: Mapping[str, Any] = request["tools"]
    box = None
    if any(spec in SANDBOX_TOOLS for spec in specs):
        box = await open_box(request["sandbox"], stack)
        if "shell" in specs and not box.capabilities.can_fork:
            raise EnvironmentSetupError(
                "tool shell starts programs, which the sandbox does not allow here, since it cannot"
                " bound the memory of several (docs/sandbox.md#memory). The tool python works."
            )
    return _tools(request, specs, box)


def _tools(request: Mapping[str, Any], specs: Mapping[str, Any], box: Sandbox | None) -> Loaded:
    own = {spec: _found(spec, sent) for spec, sent in specs.items() if spec not in SANDBOX_TOOLS}

    def functions() -> dict[str, Function]:
        folder = Folder(box) if box is not None else None
        found = [(spec, own[spec] if spec in own else getattr(folder, spec)) for spec in specs]
        return named(found)

    tools = functions()
    max_chars = request["max_result_chars"]
    described = zip(tools.values(), specs, strict=True) if request["describe"] else ()
    schemas = [schema_of(*one) for one in described]
    is_deterministic = all(getattr(one, "deterministic", False) for one in tools.values())
    hello = _hello(", ".join(tools), schemas, False, is_deterministic)
    if box is None:
        return Loaded(hello, lambda calls: ToolEpisode(tools, calls, max_chars))
    return Loaded(hello, lambda calls: ToolEpisode(functions(), calls, max_chars))


def _found(spec: str, sent: bytes | None) -> Function:
    return load_function(spec) if sent is None else pickle.loads(sent)


def _hello(
    name: str, tools: list[ToolSchema], begins: bool, is_deterministic: bool
) -> dict[str, Any]:
    return {
        "name": name,
        "tools": tools,
        "begins": begins,
        "is_deterministic": is_deterministic,
        "gives_rewards": False,
        "scores_at_end": False,
    }


async def _environment(request: Mapping[str, Any]) -> Loaded:
    spec, arguments = request["function"], request["arguments"]
    make: Callable[[], Any]
    is_unnamed = spec.removesuffix(":") in adapters.PACKAGES  # which loading it says
    if is_unnamed or adapters.is_adapted(spec):
        make = adapters.load(spec, arguments)
        in_loop = getattr(make, "is_quick", False)
    else:
        function = _found(spec, request["sent"])
        make = functools.partial(function, **arguments)
        in_loop = made_in_loop(function)
    tried = _tried(make, spec)
    has_tools = request["describe"] and not shapes.has_step(tried)
    tools = shapes.tools_of(tried) if has_tools else []
    schemas = [schema_of(one, f"{spec}: {one.__name__}") for one in tools]
    schemas += list(getattr(tried, "tools", ()))
    name = type(tried).__name__
    hello = _hello(name, schemas, True, bool(getattr(tried, "deterministic", False)))
    hello["scores_at_end"] = shapes.scores_at_end(tried)
    hello["gives_rewards"] = shapes.has_step(tried) or hello["scores_at_end"]
    if request["rows"]:
        hello["rows"] = _rows(tried, spec, arguments, request["num_rows"])
    close = getattr(tried, "close", None)
    if callable(close) and inspect.isawaitable(closing := close()):
        await closing
    max_chars = request["max_result_chars"]

    def made(calls: Calls) -> Played:
        return UserEpisode(make, calls, max_chars, in_loop=in_loop)

    return Loaded(hello, made)


def _rows(
    environment: Any, spec: str, arguments: Mapping[str, Any], number: int | None
) -> list[dict[str, Any]]:
    """Return the dataset rows that the environment provides. If it provides none: `number` rows
    that hold no more than their number (None: a default count). Raises `EnvironmentSetupError`."""
    found: Any = None
    if adapters.is_adapted(spec):
        found = adapters.rows(spec, {"num_rows": number, **arguments} if number else arguments)
    elif callable(getattr(environment, "rows", None)):
        found = environment.rows()
    if found is None:
        found = numbered_rows(number or DEFAULT_NUM_ROWS)
    try:
        rows = [dict(row) for row in found]
        json.dumps(rows, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvironmentSetupError(
            f"environment {spec}: its rows must be dicts of plain values, such as JSON has:"
            f" {shortened(str(error))}."
        ) from None
    if not rows:
        raise EnvironmentSetupError(f"environment {spec}: it brings no rows.")
    return rows


def _tried(make: Callable[[], Any], spec: str) -> Any:
    """Make an environment to examine it. Raises `EnvironmentSetupError` if that fails."""
    try:
        environment = make()
    except Exception as error:
        raise EnvironmentSetupError(
            f"environment {spec}: making one raised {type(error).__name__}:"
            f" {shortened(str(error))}. It is called with environment.arguments, for each episode."
        ) from error
    shapes.checked(environment, spec)
    return environment
