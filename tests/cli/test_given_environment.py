"""Tools and environments that are objects of a Python program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import rollpacker
from rollpacker.run.parts.given import _environment_of
from tests.run.test_turns import commands, entries, save_model


def look_up(word: str) -> str:
    """Look a word up.

    Args:
        word: The word.
    """
    return word * 2


class Talk:
    def reset(self, row):
        self.turn = 0
        return f"Question {row['number']}."

    def step(self, message):
        self.turn += 1
        return "And then?", float(len(message["content"]) % 2), self.turn == 2


def other():
    def look_up(word: str) -> str:
        return word

    return look_up


def run(folder: Path, environment: dict, **more) -> list[dict]:
    torch.set_num_threads(1)
    save_model(folder / "model")
    config = {
        "name": "talk",
        "runs_dir": str(folder / "runs"),
        "model.path": str(folder / "model"),
        "data.max_prompt_tokens": 300,
        "data.train.chat": True,
        "environment": {**environment, "workers": 1},
        "rollout": {
            "prompts_per_step": 2,
            "samples_per_prompt": 2,
            "max_response_tokens": 24,
            "stop": ["a", "e", "i", "o", "t", "s"],
        },
        "train": {"steps": 1},
    }
    data = [{"prompt": f"Row {number}", "number": number} for number in range(4)]
    rollpacker.train(config, data=data, display=False, **more)
    return entries(folder)


def test_a_class_and_tools_of_this_program(tmp_path: Path) -> None:
    found = run(tmp_path, {"function": Talk}, rewards=["environment"])
    assert commands(found, "TrainOn") and commands(found, "Continue")
    said = (tmp_path / "runs" / "talk" / "config.yaml").read_text()
    assert "<python>:environment.Talk" in said
    (tmp_path / "tools").mkdir()
    found = run(
        tmp_path / "tools",
        {"tools": [look_up]},
        rewards=[lambda completions, **_: [float(len(one)) for one in completions]],
    )
    assert commands(found, "TrainOn")

    assert (
        "<python>:environment.look_up"
        in (tmp_path / "tools" / "runs" / "talk" / "config.yaml").read_text()
    )


def test_two_tools_of_one_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='two tools are called "look_up"'):
        run(tmp_path, {"tools": [look_up, other()]})


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"tools": [lambda word: word]}, "a lambda has no name"),
        ({"function": object()}, "environment.function is one object, and each episode has its"),
    ],
)
def test_what_is_no_tool_or_environment(
    tmp_path: Path, environment: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(tmp_path, environment)


def test_a_lambda_may_make_environments() -> None:
    objects: dict[str, Any] = {}
    made = _environment_of({"function": lambda: None}, objects)
    assert made["function"] == "<python>:environment.reward" and len(objects) == 1
