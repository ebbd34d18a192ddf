"""A task of reasoning-gym: an answer, a hint, and another answer."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("reasoning_gym")

from rollpacker.data.dataset import DatasetConfig, TaskConfig
from rollpacker.data.procedural import make_rows
from rollpacker.integrations import environments as adapters
from tests.environments.adapters.play import play

NAME = "reasoning-gym:chain_sum"
SUMS = {"min_terms": 2, "max_terms": 2, "num_rows": 4}


def run(answers: list[str], arguments: dict | None = None, row: dict | None = None):
    said = iter(answers)
    factory = adapters.load(NAME, {**SUMS, **(arguments or {})})
    row = row or adapters.rows(NAME, SUMS)[0]
    return asyncio.run(play(factory(), {**row, "seed": 1}, lambda _: next(said)))


def test_right_at_once_right_with_the_hint_and_wrong_twice() -> None:
    row = adapters.rows(NAME, SUMS)[0]
    right = row["answer"]
    dialogue, rewards = run([right])
    assert rewards == [1.0] and dialogue[0]["content"] == row["question"]
    dialogue, rewards = run(["x", right])
    assert rewards == [None, 0.5]
    assert dialogue[2]["content"] == (
        f"That is not right. The answer has {len(right)} characters and begins with {right[0]}."
        " Try again."
    )
    assert run(["x", "y"])[1] == [None, 0.0]


def test_what_the_arguments_say() -> None:
    right = adapters.rows(NAME, SUMS)[0]["answer"]
    arguments = {
        "hint": "It is {answer}.",
        "second_weight": 0.25,
        "instructions": "Write <answer>.",
        "system_prompt": "Add.",
        "answer_regex": "<answer>(.*?)</answer>",
    }
    dialogue, rewards = run([right, f"<answer>{right}</answer>"], arguments)
    assert rewards == [None, 0.25]
    assert dialogue[0]["content"] == "Add." and dialogue[1]["content"].endswith("Write <answer>.")
    assert dialogue[3]["content"] == f"It is {right}."
    assert run(["x", right], {"right_at": 0.0})[1] == [0.0]


def test_rows_are_made_of_their_seed_and_those_of_a_mixture_do_as_well() -> None:
    assert adapters.rows(NAME, SUMS) == adapters.rows(NAME, SUMS)
    assert len(adapters.rows(NAME, SUMS)) == 4
    assert adapters.rows(NAME, SUMS) != adapters.rows(NAME, {**SUMS, "seed": 1})
    tasks = (TaskConfig(task="number_sorting"),)
    config = DatasetConfig(kind="reasoning_gym", tasks=tasks, size=1)
    row = dict(make_rows(config, "train")[0].columns)
    assert run([row["answer"]], row=row)[1] == [1.0]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("chain_sun", {}, 'no task chain_sun. Did you mean "chain_sum"?'),
        ("chain_sum", {"min_term": 3}, 'no option min_term. Did you mean "min_terms"?'),
        ("chain_sum", {"hint": "{x}"}, "hint has 'x', which stands for nothing"),
        ("chain_sum", {"right_at": "1"}, "right_at is '1', which is no int or float"),
        ("chain_sum", {"answer_regex": "("}, "is no regular expression"),
        ("countdown", {}, "runs the model's answer as Python"),
    ],
)
def test_one_message_for_what_cannot_be(name, arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        adapters.load(f"reasoning-gym:{name}", arguments)
