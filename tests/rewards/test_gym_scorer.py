"""The reasoning-gym scorer, and the tasks whose own scorers would run a model's answer as code."""

import asyncio
from functools import cache
from typing import Any

import pytest
from reasoning_gym.factory import DATASETS

from rollpacker.data.dataset import DatasetConfig, TaskConfig
from rollpacker.data.procedural import create_task, make_rows
from rollpacker.rewards.build import build_reward
from rollpacker.rewards.reasoning_gym import evaluates_answers, make
from rollpacker.rewards.reward import Failed, RewardConfig, RewardError, RewardInput, Scored
from rollpacker.rewards.weighted import WeightedReward


def rows(task: str, size: int = 4) -> list[dict[str, Any]]:
    config = DatasetConfig(kind="reasoning_gym", size=size, tasks=(TaskConfig(task=task),))
    return [row.columns for row in make_rows(config, "train")]


@cache
def gym(**arguments: Any) -> WeightedReward:
    """One worker for all that is asked of such a reward here: importing the library takes long."""
    return build_reward([RewardConfig(function="reasoning_gym", workers=1, arguments=arguments)])


def verdict(completion: str, row: dict[str, Any], reason: str = "stop", **arguments: Any) -> Any:
    sample = RewardInput(
        prompt=row["question"],
        completion=completion,
        completion_tokens=(),
        finish_reason=reason,
        columns=row,
    )
    (one,) = asyncio.run(gym(**arguments).score([sample]))
    return one.value if isinstance(one, Scored) else one


def value(completion: str, row: dict[str, Any], reason: str = "stop", **arguments: Any) -> float:
    """As `verdict`, of a scorer in this process."""
    scorer = make(**arguments)
    columns = {name: [column] for name, column in row.items()}
    (number,) = scorer(completions=[completion], finish_reasons=[reason], **columns)
    return number


def test_scores_answers() -> None:
    row = rows("chain_sum")[0]
    assert verdict(f" {row['answer']}\n", row) == 1.0
    assert verdict("no idea", row) == 0.0
    assert verdict("", row) == 0.0


def test_finds_the_answer() -> None:
    row = rows("chain_sum")[0]
    own = row["answer"]
    for text in (f"1+2=3;3+4={own}", f"...!{own}", own, f"4-1=3;{own} "):
        assert value(text, row, answer_regex="[^=;!]*$") == 1.0
    assert value(f"<a>7</a> <a>{own}</a>", row, answer_regex="<a>(.*?)</a>") == 1.0
    assert value(f"the answer is {own}", row, answer_regex="<a>(.*?)</a>") == 0.0
    assert value("4=", row, answer_regex="[^=;!]*$") == 0.0


def test_cut_off_responses() -> None:
    row = rows("chain_sum")[0]
    assert value(row["answer"], row, reason="length") == 1.0
    assert value(row["answer"], row, reason="length", require_stop=True) == 0.0
    assert value(row["answer"], row, require_stop=True) == 1.0


def test_answers_are_never_run_as_code(tmp_path: Any) -> None:
    row = rows("spiral_matrix")[0]
    attack = f"[open({str(tmp_path / 'pwned')!r}, 'w')]"
    refused = verdict(attack, row)
    assert isinstance(refused, Failed)
    assert "runs the model's answer as Python" in refused.reason
    assert not (tmp_path / "pwned").exists()
    reward = gym()
    with pytest.raises(RewardError, match="spiral_matrix"):
        reward.check([(None, row)])
    assert verdict(row["answer"], row, allow_evaluation=True) == 1.0


def test_which_tasks_are_refused() -> None:
    """The list of the installed version: a new entry wants a look before it is accepted here."""
    refused = {task for task in DATASETS if evaluates_answers(type_only(DATASETS[task][0]), task)}
    assert refused == {
        "binary_matrix",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }


def type_only(dataset_class: type) -> Any:
    """An instance without its constructor: the check looks at the class alone."""
    return object.__new__(dataset_class)


def test_other_data_is_refused_with_the_reason() -> None:
    reward = gym()
    with pytest.raises(RewardError, match="needs the column question"):
        reward.check([(None, {"answer": "4"})])


@pytest.mark.parametrize("task", ["gcd", "number_sorting", "word_sorting", "base_conversion"])
def test_own_answers_score_full_marks(task: str) -> None:
    for row in rows(task):
        assert value(row["answer"], row) == 1.0
    assert create_task(task, {}, 1, 0) is not None
