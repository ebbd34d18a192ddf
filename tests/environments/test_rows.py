"""Rows that an environment brings along (`data.train.kind=environment`)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rollpacker.config.load import ConfigError, load_config
from rollpacker.config.schema import RunConfig
from rollpacker.data.dataset import DataConfig, DataError, DatasetConfig
from rollpacker.data.files import brought_rows
from rollpacker.data.prompts import load_few, load_prompts
from rollpacker.environments.environment import EnvironmentConfig, EnvironmentSetupError
from rollpacker.environments.supervised import SupervisedEnvironments
from tests.data.characters import character_tokenizer

SOURCE = """
class Plain:
    def reset(self, row):
        return "Guess."
    def step(self, message):
        return [], 1.0, True

class Brings(Plain):
    def rows(self):
        return [{"number": 4}, {"number": 5, "prompt": "Another one."}]

class Empty(Plain):
    def rows(self):
        return []

class Strange(Plain):
    def rows(self):
        return [{"number": {1, 2}}]

class Tools:
    def reset(self):
        return None
    def rows(self):
        return [{"number": 6}]
    def look_up(self, word: str) -> str:
        '''Look a word up.

        Args:
            word: The word.
        '''
        return word
"""


def brought(tmp_path: Path, name: str, number: int | None = None) -> SupervisedEnvironments:
    (tmp_path / "env.py").write_text(SOURCE)
    config = EnvironmentConfig(function=f"{tmp_path}/env.py:{name}")
    environments = SupervisedEnvironments(config, brings_rows=True, num_rows=number)
    asyncio.run(environments.close())
    return environments


def test_its_own_rows_or_so_many_numbers(tmp_path: Path) -> None:
    assert brought(tmp_path, "Brings").rows == (
        {"number": 4},
        {"number": 5, "prompt": "Another one."},
    )
    assert brought(tmp_path, "Plain", 2).rows == ({"episode": 0}, {"episode": 1})
    assert len(brought(tmp_path, "Plain").rows or ()) == 1024


def test_rows_is_no_tool(tmp_path: Path) -> None:
    found = brought(tmp_path, "Tools")
    assert found.rows == ({"number": 6},)
    assert [tool["function"]["name"] for tool in found.tools] == ["look_up"]


@pytest.mark.parametrize(
    ("name", "said"), [("Empty", "it brings no rows"), ("Strange", "must be dicts of plain values")]
)
def test_rows_that_are_none(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(EnvironmentSetupError, match=said):
        brought(tmp_path, name)


def test_the_start_tells_no_name_for_a_prompt(caplog: pytest.LogCaptureFixture) -> None:
    """Nor that it holds characters that the tokenizer does not know."""
    train = DatasetConfig(kind="environment", chat=False)
    for rows, told in (
        ([{"number": 4}], "data.train: 1 rows; the environment says the prompts"),
        ([{"prompt": "1+2="}], "first prompt, 4 tokens"),
    ):
        found, _ = load_prompts(DataConfig(train=train), character_tokenizer(), brought=rows)
        assert any(told in line for line in found.told), found.told
    assert "does not know" not in caplog.text


def test_a_row_without_a_prompt_is_told_from_the_others() -> None:
    config = DatasetConfig(kind="environment", size=3)
    rows = [{"number": 4}, {"prompt": "Guess."}, {"text": "x" * 1000}, {"number": 5}]
    prompts = [row.columns["prompt"] for row in brought_rows(config, rows)]
    assert prompts == ['row 0: {"number": 4}', "Guess.", "row 2"]


def test_one_message_for_what_cannot_be(tmp_path: Path) -> None:
    def load(*overrides: str) -> RunConfig:
        path = tmp_path / "run.yaml"
        path.write_text(
            "name: x\nmodel: {path: m}\ndata: {train: {kind: environment}}\n"
            "rewards: [{function: math}]\ntrain: {steps: 1}\n"
            "rollout: {prompts_per_step: 1, samples_per_prompt: 2, max_response_tokens: 8}\n"
        )
        return load_config(str(path), overrides, RunConfig)

    with pytest.raises(ConfigError, match=r"there is none: set environment\.function"):
        load()
    with pytest.raises(ConfigError, match=r"there is none: set environment\.function"):
        load("environment.tools=[t.py:f]")
    function = "environment.function=env.py:Plain"
    with pytest.raises(ConfigError, match=r"by data\.eval_fraction"):
        load(function, "data.eval={kind: environment}")
    with pytest.raises(ConfigError, match="and tasks are not used"):
        load(function, "data.train.path=x")
    with pytest.raises(DataError, match="once the environment runs"):
        load_few(load(function).data, "train", None)
