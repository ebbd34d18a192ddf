r"""Environments of Gymnasium that can be played in text: `gymnasium:FrozenLake-v1`.

The model reads an observation as it is if it is a text, else as JSON; if the environment draws
itself in text (`render_mode="ansi"`), the drawing follows, with coloured parts in brackets. The
model's action is its whole message in a `Text` space, and in a `Discrete` space the last number, or
name of `actions`, in the message. A message without an action is answered with the list of actions,
without a step of the environment.

Arguments: `actions` (names of the actions of a `Discrete` space, in order), `instructions` (text
before the first observation), `system_prompt`, `num_rows`, and those of the environment.
`gymnasium:module:Id-v0` imports a module first, which registers it.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollpacker.did_you_mean import did_you_mean
from rollpacker.environments.environment import Message
from rollpacker.imports import require
from rollpacker.integrations.environments.messages import (
    AdapterError,
    OwnArguments,
    as_text,
    numbered_rows,
    opening,
    said,
    seed_of,
    text_of,
)

_MARKED = re.compile(r"\x1b\[[\d;]*m(.*?)\x1b\[0m", re.DOTALL)
"""Matches text drawn in colour: in Gymnasium's own environments the player's place."""


def factory(name: str, arguments: dict[str, Any]) -> Callable[[], GymnasiumEnvironment]:
    settings, rest = _settings(name, arguments)
    env = _make(name, rest)
    env.close()
    space = env.action_space
    kind = type(space).__name__
    if kind not in ("Discrete", "Text"):
        raise AdapterError(
            f"gymnasium:{name} takes actions of {space}, which no text says; it has to be Discrete"
            " or Text. Wrap it (gymnasium.ActionWrapper) and register what you made."
        )
    if settings.actions and (kind != "Discrete" or space.n != len(settings.actions)):
        raise AdapterError(
            f"gymnasium:{name} takes actions of {space}, for which actions names"
            f" {len(settings.actions)}."
        )
    return lambda: GymnasiumEnvironment(_make(name, rest), settings)


def rows(name: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    _check_name(name)
    return numbered_rows(OwnArguments(f"gymnasium:{name}", arguments).take_num_rows())


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The adapter's own arguments, which the module's docstring describes."""

    actions: tuple[str, ...] = ()
    instructions: str | None = None
    system_prompt: str | None = None


class GymnasiumEnvironment:
    """One episode of a Gymnasium environment, which `close` ends."""

    deterministic = True

    def __init__(self, env: Any, settings: Settings) -> None:
        self._env = env
        self._settings = settings
        self._is_text = type(env.action_space).__name__ == "Text"
        self._first = int(getattr(env.action_space, "start", 0))
        number = int(getattr(env.action_space, "n", 0))
        self._names = [str(self._first + index) for index in range(number)]

    def reset(self, row: Mapping[str, Any]) -> Sequence[Message]:
        observation, _ = self._env.reset(seed=seed_of(row))
        of = self._settings
        told = of.instructions, self._text(observation), self._choices()
        return opening(*told, system_prompt=of.system_prompt)

    def step(
        self, message: Message
    ) -> tuple[Sequence[Message], float | None, bool, bool, dict[str, Any]]:
        """Play one step. Returns Gymnasium's five values, with an empty `info`. A message that
        names no action is answered with the list of actions, and the environment is not stepped."""
        action = text_of(message) if self._is_text else self._action(text_of(message))
        if action is None:
            return said(f"That names no action. {self._choices()}"), None, False, False, {}
        observation, reward, terminated, truncated, _ = self._env.step(action)
        text = self._text(observation)
        return said(text), float(reward), bool(terminated), bool(truncated), {}

    def close(self) -> None:
        self._env.close()

    def _action(self, text: str) -> int | None:
        """Return the number of the action that the text names last, by name or number. None:
        the text names no action."""
        known = {one.casefold(): index for index, one in enumerate(self._names)}
        known |= {one.casefold(): index for index, one in enumerate(self._settings.actions)}
        longest_first = sorted(known, key=len, reverse=True)
        pattern = "|".join(rf"(?<![\w.-]){re.escape(one)}(?![\w-]|\.\d)" for one in longest_first)
        found = re.findall(pattern, text.casefold())
        return known[found[-1]] + self._first if found else None

    def _choices(self) -> str:
        if self._is_text:
            return ""
        return f"Actions: {', '.join(self._settings.actions or self._names)}."

    def _text(self, observation: Any) -> str:
        text = as_text(observation)
        if isinstance(observation, str) or self._env.render_mode != "ansi":
            return text
        drawn = _MARKED.sub(r"[\1]", self._env.render() or "").strip("\n")
        return f"{text}\n{drawn}"


def _settings(name: str, arguments: dict[str, Any]) -> tuple[Settings, dict[str, Any]]:
    own = OwnArguments(f"gymnasium:{name}", arguments)
    actions = own.take("actions", (), list, tuple)
    settings = Settings(
        actions=tuple(str(one) for one in actions),
        instructions=own.take("instructions", None, str),
        system_prompt=own.take("system_prompt", None, str),
    )
    own.take_num_rows()
    return settings, arguments


def _make(name: str, arguments: Mapping[str, Any]) -> Any:
    """Make a new Gymnasium environment, with the render mode "ansi" (drawings as text) if it has
    that. Raises `AdapterError` if it cannot be made."""
    ident = _check_name(name)
    import gymnasium
    from gymnasium.envs.registration import load_env_creator

    try:
        entry = gymnasium.spec(ident).entry_point
        creator = load_env_creator(entry) if isinstance(entry, str) else entry
        modes = getattr(creator, "metadata", {}).get("render_modes", ())
        drawing = {"render_mode": "ansi"} if "ansi" in modes else {}
        return gymnasium.make(ident, **{**drawing, **arguments})
    except (TypeError, ValueError, AttributeError, ImportError, gymnasium.error.Error) as error:
        raise AdapterError(f"gymnasium:{name} cannot be made: {error}") from None


def _check_name(name: str) -> str:
    """Return the environment's id. For `module:Id-v0` the module, which registers the id, is
    imported first. Raises `AdapterError` for an unknown id."""
    require("gymnasium", extra="gymnasium", what="an environment of gymnasium")
    import gymnasium

    module, colon, ident = name.rpartition(":")
    try:
        if colon:
            importlib.import_module(module)
    except ImportError as error:
        raise AdapterError(f"gymnasium:{name}: {module} cannot be imported: {error}.") from None
    if ident not in gymnasium.registry:
        hint = did_you_mean(ident, gymnasium.registry)
        raise AdapterError(f"gymnasium has no environment {ident}.{hint}")
    return ident
