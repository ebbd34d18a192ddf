"""Environments on an OpenEnv server: `openenv:http://127.0.0.1:8000`.

Every episode is a session of the server. The model's text becomes one field of an action; the model
reads one field of the observation, or all of it as JSON. If the server refuses an action, its
message goes to the model. Starting a server, from an image or a hub, is left to OpenEnv.

Arguments: `action` (name of the action's field, by default "message"), `observation` (name of the
observation's field, by default all of it), `instructions` (text before the first observation),
`system_prompt`, `reset` (further arguments of the environment's reset, beside the seed),
`num_rows`.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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

_HEALTH_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The adapter's own arguments, which the module's docstring describes."""

    action: str = "message"
    observation: str | None = None
    instructions: str | None = None
    system_prompt: str | None = None
    reset: Mapping[str, Any] = field(default_factory=dict)


def factory(name: str, arguments: dict[str, Any]) -> Callable[[], OpenEnvEnvironment]:
    _require()
    own = OwnArguments(f"openenv:{name}", arguments)
    settings = Settings(
        action=own.take("action", "message", str),
        observation=own.take("observation", None, str),
        instructions=own.take("instructions", None, str),
        system_prompt=own.take("system_prompt", None, str),
        reset=own.take("reset", {}, Mapping),
    )
    own.take_num_rows()
    own.check_nothing_left()
    _check_server(name)
    return lambda: OpenEnvEnvironment(name, settings)


def rows(name: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    _require()
    return numbered_rows(OwnArguments(f"openenv:{name}", arguments).take_num_rows())


class OpenEnvEnvironment:
    """One episode: a session of an OpenEnv server."""

    deterministic = False

    def __init__(self, url: str, settings: Settings) -> None:
        from openenv.core import GenericEnvClient

        self._client = GenericEnvClient(base_url=url)
        self._settings = settings

    async def reset(self, row: Mapping[str, Any]) -> Sequence[Message]:
        of = self._settings
        result = await self._client.reset(**{"seed": seed_of(row), **of.reset})
        told = of.instructions, self._text(result.observation)
        return opening(*told, system_prompt=of.system_prompt)

    async def step(self, message: Message) -> tuple[Sequence[Message], float | None, bool]:
        try:
            result = await self._client.step({self._settings.action: text_of(message)})
        except RuntimeError as error:
            if "VALIDATION_ERROR" not in str(error):
                raise
            return said(f"That is no action. {error}"), None, False
        if result.done:
            await self.close()
        reward = None if result.reward is None else float(result.reward)
        return said(self._text(result.observation)), reward, bool(result.done)

    async def close(self) -> None:
        await self._client.close()

    def _text(self, observation: Mapping[str, Any]) -> str:
        wanted = self._settings.observation
        if wanted is None:
            return as_text(observation)
        if wanted not in observation:
            raise KeyError(f"the observation has no {wanted}; it has {', '.join(observation)}")
        return as_text(observation[wanted])


def _require() -> None:
    require("openenv", extra="openenv", what="an environment of OpenEnv")


def _check_server(url: str) -> None:
    """Raise `AdapterError` if no OpenEnv server answers at this address, or if it
    is no address over HTTP."""
    if not url.startswith(("http://", "https://")):
        raise AdapterError(f"openenv:{url}: write openenv:http://HOST:PORT, where its server is.")
    try:
        urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=_HEALTH_TIMEOUT_S).close()
    except OSError as error:
        raise AdapterError(
            f"no OpenEnv server answers at {url}: {error}. Start it first."
        ) from None
