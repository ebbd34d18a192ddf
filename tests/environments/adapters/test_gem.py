"""GEM's guessing game."""

from __future__ import annotations

import asyncio
import logging
import re

import pytest

pytest.importorskip("gem")

from rollpacker.integrations import environments as adapters
from tests.environments.adapters.play import play

NAME = "gem:game:GuessTheNumber-v0-easy"


def halve(dialogue) -> str:
    """The middle of what is still possible, as the hints say."""
    low, high = 1, 10
    for message in dialogue[1:]:
        hint = re.search(r"number is (lower|higher) than (\d+)", message["content"])
        if hint:
            guess = int(hint[2])
            low, high = (low, guess - 1) if hint[1] == "lower" else (guess + 1, high)
    return f"\\boxed{{{(low + high) // 2}}}"


def run(policy, seed: int, arguments: dict | None = None):
    return asyncio.run(play(adapters.load(NAME, arguments or {})(), {"seed": seed}, policy))


def test_halving_wins_every_time() -> None:
    for seed in range(20):
        dialogue, rewards = run(halve, seed)
        assert rewards[-1] == 1.0 and "Congratulations" in dialogue[-1]["content"]
    opening = run(halve, 0, {"system_prompt": "Play."})[0][:2]
    assert opening[0] == {"role": "system", "content": "Play."}
    assert opening[1]["content"].endswith("Enter your next guess.")


def test_an_answer_without_a_guess_loses() -> None:
    dialogue, rewards = run(lambda _: "seven?", 0)
    assert len(rewards) == 1 and rewards[0] < 0
    assert "did not provide a valid guess" in dialogue[-1]["content"]


def test_the_same_seed_is_the_same_episode_whoever_else_plays() -> None:
    """2048 draws a tile each turn, from the process's random numbers."""
    factory = adapters.load("gem:game:Game2048-v0-easy", {})
    moves = ["up", "left", "down", "right"] * 3

    def answers(*environments):
        told = [[] for _ in environments]
        for move in moves:
            for index, environment in enumerate(environments):
                message = {"role": "assistant", "content": f"\\boxed{{{move}}}"}
                told[index].append(environment.step(message))
        return told

    alone = factory()
    begun = alone.reset({"seed": 7})
    expected = answers(alone)[0]
    one, other = factory(), factory()
    assert one.reset({"seed": 7}) == begun
    assert other.reset({"seed": 8}) != begun
    assert answers(one, other)[0] == expected


def test_importing_it_leaves_the_log_alone() -> None:
    root = logging.getLogger()
    before = list(root.handlers), root.level
    adapters.load(NAME, {})
    assert (list(root.handlers), root.level) == before


def test_rows_are_numbers() -> None:
    assert adapters.rows(NAME, {"num_rows": 2}) == [{"episode": 0}, {"episode": 1}]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("game:GuessTheNumber-v0-eas", {}, 'Did you mean "game:GuessTheNumber-v0-easy"?'),
        ("game:FifteenPuzzle-v0-random", {}, "cannot be made: TypeError: "),
        ("game:GuessTheNumber-v0-easy", {"system_prompt": 3}, "system_prompt is 3, which is no"),
    ],
)
def test_one_message_for_what_cannot_be(name, arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        adapters.load(f"gem:{name}", arguments)
