"""Environments of GEM (`gem-llm`): `gem:game:GuessTheNumber-v0-easy`.

Arguments: `system_prompt`, `num_rows`, and those of the environment. Every observation becomes one
message: GEM's wrappers, which write the whole game into every observation, are not needed, and its
tools, which run a model's code without a sandbox, are not offered. Rewards are per turn, as GEM
gives them. Its `math:`, `code:` and `qa:` environments fetch data sets from a hub.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollpacker.did_you_mean import did_you_mean
from rollpacker.environments.environment import Message
from rollpacker.imports import require
from rollpacker.integrations.environments.messages import (
    AdapterError,
    OwnArguments,
    OwnRandomness,
    numbered_rows,
    opening,
    said,
    seed_of,
    text_of,
)


def factory(name: str, arguments: dict[str, Any]) -> Callable[[], GemEnvironment]:
    own = OwnArguments(f"gem:{name}", arguments)
    system_prompt = own.take("system_prompt", None, str)
    own.take_num_rows()
    _check_name(name)
    try:
        GemEnvironment(name, arguments).reset({})
    except Exception as error:  # whatever a third party's environment needs and does not find
        reason = " ".join(str(error).replace("*", "").split())
        raise AdapterError(
            f"gem:{name} cannot be made: {type(error).__name__}: {reason[:200]}"
        ) from None
    return lambda: GemEnvironment(name, arguments, system_prompt)


def rows(name: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    _check_name(name)
    return numbered_rows(OwnArguments(f"gem:{name}", arguments).take_num_rows())


class GemEnvironment:
    """One episode of a GEM environment."""

    deterministic = True

    def __init__(
        self, name: str, arguments: Mapping[str, Any], system_prompt: str | None = None
    ) -> None:
        self._name = name
        self._arguments = arguments
        self._system_prompt = system_prompt
        self._randomness = OwnRandomness()
        self._env: Any = None

    def reset(self, row: Mapping[str, Any]) -> Sequence[Message]:
        gem = _import_gem()
        with self._randomness.drawn_from():
            self._env = gem.make(self._name, **self._arguments)
            observation, info = self._env.reset(seed=seed_of(row))
        return opening(_with_affixes(observation, info), system_prompt=self._system_prompt)

    def step(self, message: Message) -> tuple[Sequence[Message], float, bool, bool, dict[str, Any]]:
        """Play one step. Returns the five values of Gymnasium's `step`, on which GEM's is modelled;
        the last is empty."""
        with self._randomness.drawn_from():
            observation, reward, terminated, truncated, info = self._env.step(text_of(message))
        is_over = terminated or truncated
        text = observation if is_over else _with_affixes(observation, info)
        return said(text), float(reward), bool(terminated), bool(truncated), {}


def _with_affixes(observation: str, info: Mapping[str, Any]) -> str:
    """The observation for the model, with the prefix before it and the suffix after it
    that GEM's `info` may hold."""
    body = observation if not observation or observation.endswith("\n") else observation + "\n"
    return str(info.get("prefix", "")) + body + str(info.get("suffix", ""))


def _check_name(name: str) -> None:
    _import_gem()
    from gem.envs.registration import ENV_REGISTRY

    if name not in ENV_REGISTRY:
        raise AdapterError(f"gem has no environment {name}.{did_you_mean(name, ENV_REGISTRY)}")


def _import_gem() -> Any:
    """Import and return the module `gem`, without the log handler and level that it installs."""
    require("gem", extra="gem", what="an environment of gem")
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        import gem
        import gem.envs  # registers them
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    return gem
