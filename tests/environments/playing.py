"""Environments from the text of a file, and how the tests of this folder play them."""

import asyncio
import json
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from rollpacker.core.ids import PromptId, SampleId
from rollpacker.environments.environment import Answered, Begun, EnvironmentConfig, Lost
from rollpacker.environments.supervised import SupervisedEnvironments

T = TypeVar("T")


def episode(number: int = 0) -> SampleId:
    return SampleId(PromptId("train", 0, number), 0, 0)


def said(content: str = "") -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def calling(*calls: tuple[str, Any], malformed: tuple[str, ...] = ()) -> dict[str, Any]:
    """A message that calls tools with these arguments."""
    made = [
        {"id": f"call{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for n, (name, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": "", "tool_calls": made}
    return message | ({"malformed_tool_calls": list(malformed)} if malformed else {})


def write(folder: Path, source: str) -> Path:
    """A file of functions, another one each time."""
    path = folder / f"env_{len(list(folder.iterdir()))}.py"
    path.write_text(textwrap.dedent(source))
    return path


def of_class(folder: Path, source: str, name: str = "Env", **settings: Any) -> EnvironmentConfig:
    settings = {"timeout_s": 60.0, "workers": 1} | settings
    return EnvironmentConfig(function=f"{write(folder, source)}:{name}", **settings)


def of_tools(folder: Path, source: str, *names: str, **settings: Any) -> EnvironmentConfig:
    path = write(folder, source)
    settings = {"timeout_s": 60.0, "workers": 1} | settings
    return EnvironmentConfig(tools=tuple(f"{path}:{name}" for name in names), **settings)


@asynccontextmanager
async def opened(environments: SupervisedEnvironments) -> AsyncIterator[SupervisedEnvironments]:
    try:
        await environments.open()
        yield environments
    finally:
        await environments.close()


def played(config: EnvironmentConfig, play: Callable[[SupervisedEnvironments], Awaitable[T]]) -> T:
    """What `play` returns, of environments that are closed after it."""

    async def run() -> T:
        async with opened(environments) as those:
            return await play(those)

    environments = SupervisedEnvironments(config)
    return asyncio.run(run())


async def begun(those: SupervisedEnvironments, number: int = 0, **row: Any) -> Begun:
    one = await those.begin(episode(number), row, seed=7)
    assert isinstance(one, Begun), one
    return one


async def answered(
    those: SupervisedEnvironments, turn: int, message: dict[str, Any], number: int = 0
) -> Answered:
    one = await those.act(episode(number), turn, message)
    assert isinstance(one, Answered), one
    return one


def answers(config: EnvironmentConfig, message: dict[str, Any]) -> Answered:
    """Of tools, to one message."""
    return played(config, lambda those: answered(those, 1, message))


def lost_by(config: EnvironmentConfig, message: dict[str, Any] | None = None, **row: Any) -> Lost:
    """How an episode is lost, when it begins or at its first turn."""

    async def play(those: SupervisedEnvironments) -> Begun | Answered | Lost:
        one = await those.begin(episode(), row, seed=7)
        return one if isinstance(one, Lost) else await those.act(episode(), 1, message or said())

    found = played(config, play)
    assert isinstance(found, Lost), found
    return found


def content(answer: Answered, place: int = 0) -> Any:
    """What a tool answered, read as JSON where it is."""
    text = answer.messages[place]["content"]
    try:
        return json.loads(text)
    except ValueError:
        return text
