"""A made-up package of environments: one file and one row of the table of packages."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from types import ModuleType
from typing import Any

import pytest

from rollpacker.environments.calls import Calls
from rollpacker.environments.loading import load
from rollpacker.integrations.environments import PACKAGES, is_adapted


class Parrot:
    """Says what the model says, so many times; then the episode is over."""

    deterministic = True

    def __init__(self, times: int) -> None:
        self._left = times

    async def reset(self, row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        return [{"role": "user", "content": f"Say {row['word']}."}]

    async def step(self, message: Mapping[str, Any]) -> tuple[str, float, bool]:
        self._left -= 1
        return message["content"], 1.0, self._left == 0


def factory(name: str, arguments: dict[str, Any]) -> Callable[[], Parrot]:
    return lambda: Parrot(int(name))


def rows(name: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"word": "cracker"}, {"word": "pirate"}]


@pytest.fixture(autouse=True)
def a_file_and_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    file: Any = ModuleType("rollpacker.integrations.environments.parrots")
    file.factory, file.rows = factory, rows
    monkeypatch.setitem(sys.modules, file.__name__, file)
    monkeypatch.setitem(PACKAGES, "parrots", "parrots")


def test_an_episode_of_it_is_played() -> None:
    """What a worker process does of a config's `environment.function=parrots:2`."""
    assert is_adapted("parrots:2")
    request = {
        "function": "parrots:2",
        "arguments": {},
        "sent": None,
        "describe": True,
        "rows": True,
        "num_rows": None,
        "max_result_chars": 1000,
    }

    async def play() -> None:
        async with AsyncExitStack() as stack:
            loaded = await load(request, stack)
            assert loaded.hello["name"] == "Parrot"
            assert loaded.hello["is_deterministic"] and loaded.hello["gives_rewards"]
            assert loaded.hello["rows"] == rows("", {})
            episode = loaded.make(Calls())
            begun = await episode.begin({"word": "cracker", "seed": 0})
            assert [one["content"] for one in begun["messages"]] == ["Say cracker."]
            for is_last in (False, True):
                answer = await episode.act({"role": "assistant", "content": "cracker"})
                assert answer["reward"] == 1.0 and answer["done"] is is_last
            await episode.close()

    asyncio.run(play())
