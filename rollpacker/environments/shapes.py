"""The forms of environments: how they are called, known by their signatures, and what they return.

    ours        reset(row) -> messages | None        step(message) -> (messages, reward, done)
    Gymnasium   reset(*, seed, options) -> (text, info)
                step(action) -> (text, reward, terminated, truncated, info)
    TRL         reset(**columns) -> text | None, and no step: its other public methods are tools;
                get_reward() -> number, if it has one

The parameters of `reset` may be columns of the row instead. A `step` whose parameter is called
`action` gets the message's text. Runs in a worker process.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rollpacker.environments.environment import EnvironmentSetupError, Message
from rollpacker.rewards.functions.returned import shortened

_GYMNASIUM = {"seed", "options"}
_USAGE = "it must look like reset(self, row) and step(self, message)"


_ORDER = "it returns (messages, reward, done), or Gymnasium's five values"


class WrongReturn(Exception):
    """An environment returned something wrong. The message says what."""


class Stepped(NamedTuple):
    """Return `step`'s values (three, or Gymnasium's five), checked. Raises `WrongReturn`."""

    messages: list[dict[str, Any]]
    reward: float | None
    done: bool
    truncated: bool


# -- how it is called ------------------------------------------------------------------------


def checked(environment: Any, name: str) -> None:
    """Raise `EnvironmentSetupError` unless the environment has `reset`, and `step` or tools, in a
    form that can be called. `name`: the environment's name in the error message."""
    kind = type(environment).__name__
    if not callable(getattr(environment, "reset", None)):
        raise EnvironmentSetupError(f"environment {name}: a {kind} has no method reset; {_USAGE}.")
    if not has_step(environment):
        if not tools_of(environment):
            raise EnvironmentSetupError(
                f"environment {name}: a {kind} has neither a method step nor any that could be a"
                f" tool; {_USAGE}."
            )
        return
    step = _parameters(environment.step)
    required = [p.name for p in step if p.default is p.empty and p.kind not in _VARIADIC]
    if not step or len(required) > 1 or step[0].kind is inspect.Parameter.KEYWORD_ONLY:
        takes = ", ".join(p.name for p in step) or "nothing"
        raise EnvironmentSetupError(
            f"environment {name}: its step takes {takes}, not one message; {_USAGE}."
        )


def has_step(environment: Any) -> bool:
    return callable(getattr(environment, "step", None))


def scores_at_end(environment: Any) -> bool:
    """Whether the environment gives one reward, at the end: it has `get_reward`, and no `step`."""
    return not has_step(environment) and callable(getattr(environment, "get_reward", None))


def tools_of(environment: Any) -> list[Callable[..., Any]]:
    """The tools of an environment without `step` (TRL's form): its public methods other than
    `reset`, `close`, `get_reward` and `rows`."""
    kept = {"reset", "close", "get_reward", "rows"}
    names = [name for name in dir(type(environment)) if not name.startswith("_")]
    found = [getattr(environment, name) for name in names if name not in kept]
    return [one for one in found if inspect.ismethod(one)]


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def reset_arguments(
    reset: Callable[..., Any], row: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the named arguments with which to call `reset`. Raises
    `WrongReturn` if the dataset row lacks a column that is needed."""
    parameters = _parameters(reset)
    names = {p.name for p in parameters}
    plain = [p for p in parameters if p.kind not in _VARIADIC]
    if not parameters:
        return (), {}
    own = any(p.name == "options" and p.default is p.empty for p in plain) and "options" in row
    if plain and names <= _GYMNASIUM and not own:
        given = {"seed": row["seed"], "options": dict(row)}
        return (), {name: given[name] for name in names}
    first = parameters[0]
    by_position = first.kind is not inspect.Parameter.KEYWORD_ONLY and first in plain
    alone = by_position and len(plain) == 1 and first.name not in row
    if by_position and (first.name == "row" or alone):
        return (dict(row),), {}
    lacking = [p.name for p in plain if p.default is p.empty and p.name not in row]
    if lacking:
        raise WrongReturn(f"needs the column {lacking[0]}; the row has: {', '.join(map(str, row))}")
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    return (), {k: v for k, v in row.items() if takes_all or k in names}


def step_argument(step: Callable[..., Any], message: Message) -> Any:
    """The argument for `step`: the message, or its text if the parameter is called `action`."""
    return message.get("content") or "" if _parameters(step)[0].name == "action" else dict(message)


# -- what it returns -------------------------------------------------------------------------


def prompt_of(returned: Any) -> list[dict[str, Any]] | None:
    """The prompt that `reset` returned. None: the row's own prompt is used. Raises `WrongReturn`
    for anything else."""
    if (
        isinstance(returned, tuple)
        and len(returned) == 2
        and isinstance(returned[1], Mapping)
        and "role" not in returned[1]
    ):
        returned = returned[0]  # Gymnasium's observation and info
    if returned is None:
        return None
    messages = messages_of(returned)
    if not messages:
        raise WrongReturn("returned no message; None means that the row's own prompt is used")
    return messages


def stepped(returned: Any) -> Stepped:
    """The values that `step` returned, checked. Raises `WrongReturn`."""
    if not isinstance(returned, tuple | list) or len(returned) not in (3, 5):
        raise WrongReturn(f"returned {_kind(returned)}, not (messages, reward, done)")
    said, reward, done = returned[0], _plain(returned[1]), _plain(returned[2])
    is_done = _flag("done" if len(returned) == 3 else "terminated", done)
    truncated = _flag("truncated", _plain(returned[3])) if len(returned) == 5 else False
    if isinstance(reward, bool) and not isinstance(done, bool):
        raise WrongReturn(f"returned {reward} for the reward and {done} for done; {_ORDER}")
    is_over = is_done or truncated
    messages = messages_of(said)
    if not messages and not is_over:
        raise WrongReturn("returned no message although the episode is not over")
    return Stepped(messages, number(reward), is_over, truncated and not is_done)


def _plain(value: Any) -> Any:
    """A number or truth value of numpy or torch as a Python value; other values as they are."""
    item = getattr(value, "item", None)
    if callable(item):
        with contextlib.suppress(Exception):  # an array of several has none
            return item()
    return value


def _flag(name: str, value: Any) -> bool:
    """The truth value of True, False, 1 or 0. Raises `WrongReturn` for other values."""
    if isinstance(value, bool) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    told = shortened(repr(value)) if isinstance(value, str | int | float) else _kind(value)
    raise WrongReturn(f"returned {told} for {name}, which is neither True nor False; {_ORDER}")


def _kind(value: Any) -> str:
    kind = type(value).__name__
    return f"a {kind} of {len(value)}" if isinstance(value, tuple | list) else kind


def messages_of(said: Any) -> list[dict[str, Any]]:
    """The messages in a returned value: a list of messages, a single message, or a text, which
    becomes a user's message. Raises `WrongReturn`."""
    if said is None or said == "":
        return []
    if isinstance(said, str):
        return [{"role": "user", "content": said}]
    if isinstance(said, Mapping):
        said = [said]
    if not isinstance(said, Sequence) or isinstance(said, bytes):
        raise WrongReturn(f"said {_kind(said)}, which is neither text nor messages")
    for one in said:
        if not isinstance(one, Mapping) or not isinstance(one.get("role"), str):
            raise WrongReturn(f"said a {_kind(one)} where a message with a role belongs")
        if not isinstance(one.get("content"), str | list | None):
            raise WrongReturn(f"said a message whose content is {_kind(one['content'])}")
    return [dict(one) for one in said]


def number(reward: Any) -> float | None:
    """The reward as a float. None stays None. Raises `WrongReturn` for what is no finite number."""
    if reward is None:
        return None
    try:
        found = math.nan if isinstance(reward, str | bytes) else float(reward)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        found = math.nan
    if not math.isfinite(found):
        raise WrongReturn(f"returned a reward that is no number: {_kind(reward)}")
    return found


def with_observation(prompt: Any, said: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The row's prompt, with `reset`'s text (`said`) added to its last message, as in TRL."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, Sequence) or not prompt or len(said) != 1:
        return said
    last = dict(prompt[-1])
    last["content"] = f"{last.get('content') or ''}{said[0]['content']}"
    return [*map(dict, prompt[:-1]), last]
