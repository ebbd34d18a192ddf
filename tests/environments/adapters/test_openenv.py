"""An environment behind OpenEnv's own server, on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

pytest.importorskip("openenv.core")

from rollpacker.integrations import environments as adapters
from tests.environments.adapters.guess_server import serving
from tests.environments.adapters.play import play


@pytest.fixture(scope="module")
def name() -> Iterator[str]:
    with serving() as url:
        yield f"openenv:{url}"


def test_play(name) -> None:
    arguments = {"action": "guess", "observation": "hint", "instructions": "0 to 7."}
    factory = adapters.load(name, arguments)
    says = iter(["4", "five", "6", "5"])
    dialogue, rewards = asyncio.run(play(factory(), {"seed": 5}, lambda _: next(says)))
    assert dialogue[0]["content"] == "0 to 7.\n\nGuess."
    assert rewards == [-0.25, None, -0.25, 1.0]
    told = [message["content"] for message in dialogue[2::2]]
    assert told[0] == "higher" and "That is no action" in told[1] and told[2:] == ["lower", "Yes."]


def test_many_at_once_and_the_seed_is_theirs(name) -> None:
    factory = adapters.load(name, {"action": "guess", "reset": {"offset": 1}})

    async def episodes():
        rows = [{"seed": seed} for seed in range(8)]
        plays = (play(factory(), row, lambda _, row=row: str(row["seed"] + 1)) for row in rows[:7])
        return await asyncio.gather(*plays)

    assert [rewards for _, rewards in asyncio.run(episodes())] == [[1.0]] * 7


def test_one_message_for_what_cannot_be(name) -> None:
    for broken, message in [
        ("openenv:http://127.0.0.1:9", "no OpenEnv server answers at http://127.0.0.1:9"),
        ("openenv:echo-env", "write openenv:http://HOST:PORT"),
    ]:
        with pytest.raises(ValueError, match=message):
            adapters.load(broken, {})
    with pytest.raises(ValueError, match=r'no argument acton\. Did you mean "action"\?'):
        adapters.load(name, {"acton": "guess"})
    factory = adapters.load(name, {"action": "guess", "observation": "text"})
    with pytest.raises(KeyError, match=r"the observation has no text; it has .*hint"):
        asyncio.run(factory().reset({"seed": 1}))
