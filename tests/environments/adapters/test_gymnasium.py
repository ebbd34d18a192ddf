"""Gymnasium's own FrozenLake, played in text."""

from __future__ import annotations

import asyncio
import re
import string

import pytest

pytest.importorskip("gymnasium")

import gymnasium

from rollpacker.integrations import environments as adapters
from tests.environments.adapters.play import play

NAME = "gymnasium:FrozenLake-v1"
LAKE = {"is_slippery": False, "actions": ["left", "down", "right", "up"]}
WAY = ["down", "I go DOWN.", "right", "1", "down? no: right", "So: 2"]
"""Over the ice to the goal, in the ways in which a model may say it."""


def walk(name: str, arguments: dict, answers: list[str], seed: int = 3):
    said = iter(answers)
    return asyncio.run(play(adapters.load(name, arguments)(), {"seed": seed}, lambda _: next(said)))


def test_the_way_to_the_goal_wins() -> None:
    dialogue, rewards = walk(
        NAME, {**LAKE, "instructions": "Cross.", "system_prompt": "Play."}, WAY
    )
    assert rewards == [0.0] * 5 + [1.0]
    assert dialogue[0] == {"role": "system", "content": "Play."}
    first = dialogue[1]["content"]
    assert first.startswith("Cross.\n\n0\n[S]FFF\n") and first.endswith("left, down, right, up.")
    assert dialogue[-1]["content"].startswith("15\n") and "[G]" in dialogue[-1]["content"]


def test_a_hole_loses() -> None:
    dialogue, rewards = walk(NAME, LAKE, ["right", "down"])
    assert rewards == [0.0, 0.0] and "[H]" in dialogue[-1]["content"]


@pytest.mark.parametrize("answer", ["jump", "", "downwards", "1.5", "-1", "4", "1e3"])
def test_what_names_no_action_is_no_step(answer) -> None:
    dialogue, rewards = walk(NAME, LAKE, [answer, *WAY])
    assert rewards[0] is None and rewards[-1] == 1.0
    assert dialogue[2]["content"] == "That names no action. Actions: left, down, right, up."


def test_the_same_seed_is_the_same_episode() -> None:
    slippery = {**LAKE, "is_slippery": True}
    always = ["down"] * 60
    found = [walk(NAME, slippery, always, seed) for seed in (1, 1, 2, 3, 4)]
    assert found[0] == found[1]
    assert any(one != found[0] for one in found[2:])


def test_observations_that_are_numbers() -> None:
    dialogue, _ = walk("gymnasium:CartPole-v1", {}, ["0"] * 60)
    assert re.fullmatch(
        r"\[-?[\d.e-]+(, -?[\d.e-]+){3}\]\n\nActions: 0, 1\.", dialogue[0]["content"]
    )


class Echo(gymnasium.Env):
    """Texts both ways: "done" is what it waits for. Its time is limited when it is registered."""

    observation_space = gymnasium.spaces.Text(64, charset=string.printable)
    action_space = gymnasium.spaces.Text(64, charset=string.printable)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "Say done.", {}

    def step(self, action):
        return f"You said {action}", float(action == "done"), action == "done", False, {}


gymnasium.register("Echo-v0", entry_point=Echo, max_episode_steps=3)


def test_an_environment_of_ones_own_whose_actions_are_texts() -> None:
    name = "gymnasium:tests.environments.adapters.test_gymnasium:Echo-v0"
    dialogue, rewards = walk(name, {}, ["what?", "done"])
    assert [message["content"] for message in dialogue[::2]] == [
        "Say done.",
        "You said what?",
        "You said done",
    ]
    assert rewards == [0.0, 1.0]
    environment = adapters.load(name, {})()
    environment.reset({"seed": 1})
    answers = [environment.step({"role": "assistant", "content": "no"}) for _ in range(3)]
    assert [answer[2:4] for answer in answers] == [(False, False), (False, False), (False, True)]


def test_rows_are_numbers() -> None:
    assert adapters.rows(NAME, {**LAKE, "num_rows": 2}) == [{"episode": 0}, {"episode": 1}]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("FrozenLak-v1", {}, 'no environment FrozenLak-v1. Did you mean "FrozenLake-v1"?'),
        ("FrozenLake-v1", {"slippery": True}, "cannot be made: .*slippery"),
        ("MountainCarContinuous-v0", {}, "takes actions of Box.*, which no text says"),
        ("FrozenLake-v1", {"actions": ["up"]}, "Discrete.4., for which actions names 1"),
        ("FrozenLake-v1", {"actions": "up"}, "actions is 'up', which is no list"),
        ("FrozenLake-v1", {"num_rows": 0}, "num_rows is 0; it must be at least 1"),
        ("no_such_module:X-v0", {}, "no_such_module cannot be imported"),
    ],
)
def test_one_message_for_what_cannot_be(name, arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        adapters.load(f"gymnasium:{name}", arguments)
