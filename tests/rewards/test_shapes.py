"""Functions written for other frameworks are called as these call them."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollpacker.rewards.functions.shapes import Binding, Signature, shape_of
from rollpacker.rewards.reward import Failed, RewardConfig, RewardError, RewardInput, Shape
from tests.rewards.plain import reward, sample, scored, values

VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    seen = {"source": data_source, "extra": extra_info}
    if solution_str == "show":
        raise ValueError(str(seen))
    return float(solution_str == ground_truth)
"""
OPENRLHF = """
class Tensor:
    def __init__(self, values): self.values = values
    def __len__(self): return len(self.values)
    def __iter__(self): return iter(self.values)
def reward_func(queries, prompts, labels, **kwargs):
    scores = [float(q == p + l) for q, p, l in zip(queries, prompts, labels)]
    if kwargs:
        raise ValueError(sorted(kwargs))
    return {"rewards": Tensor(scores), "scores": Tensor([9.0] * len(scores)), "extra_logs": {}}
"""
AREAL = """
async def reward_fn(prompt, completions, prompt_ids, completion_ids, answer, **data):
    if completions == "show":
        raise ValueError(f"{prompt} {prompt_ids} {completion_ids} {sorted(data)}")
    return int(answer in completions)
"""


def parameters(*names: str, optional: tuple[str, ...] = (), rest: bool = False) -> Signature:
    return Signature((*names, *optional), names, (), rest)


@pytest.mark.parametrize(
    ("signature", "expected"),
    [
        (parameters("completions", "answer", rest=True), "trl"),
        (parameters("prompts", "completions", rest=True), "trl"),
        (parameters("completions", "ground_truth"), "trl"),
        (parameters("completions", "prompt"), "trl"),
        (parameters("completions", "labels"), "trl"),
        (parameters(rest=True), "trl"),
        (
            parameters("data_source", "solution_str", "ground_truth", optional=("extra_info",)),
            "verl",
        ),
        (parameters("solution_str", "ground_truth", rest=True), "verl"),
        (parameters("queries", "prompts", "labels"), "openrlhf"),
        (parameters("queries", "labels", rest=True), "openrlhf"),
        (parameters("prompt", "completions", "prompt_ids", "completion_ids", "answer"), "areal"),
    ],
)
def test_shapes_are_told_apart(signature: Signature, expected: Shape) -> None:
    assert shape_of(signature) == expected


def test_verl(tmp_path: Path) -> None:
    one = reward(tmp_path, VERL, "compute_score")
    samples = [
        sample("4", ground_truth="4"),
        sample("4", reward_model={"style": "rule", "ground_truth": "5"}),
        sample("4", answer="4"),
        sample("show", task="gsm8k", answer="4", extra_info={"index": 3}),
        sample("show", data_source="openai/gsm8k", answer="4"),
        sample("4"),
    ]
    *numbers, shown, source, missing = values(one, samples)
    assert numbers == [1.0, 0.0, 1.0]
    assert "{'source': 'gsm8k', 'extra': {'index': 3}}" in str(shown)
    assert "{'source': 'openai/gsm8k', 'extra': None}" in str(source)
    assert "it needs the column ground_truth" in str(missing)
    with pytest.raises(RewardError, match="needs the column ground_truth; row 0 has: question"):
        one.check([(None, {"question": "2+2"})])


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("{'score': 0.5, 'acc': True}", 0.5),
        ("True", 1.0),
        ("None", "no verdict: f returned None"),
        ("{'acc': 1.0}", "f returned a dict without score: acc"),
        ("{'score': 'high'}", "f returned 'high', not a number"),
        ("[1.0]", "f returned [1.0], not a number"),
    ],
)
def test_what_verl_functions_return(tmp_path: Path, returned: str, expected: Any) -> None:
    source = f"def f(solution_str, ground_truth):\n    return {returned}\n"
    assert values(reward(tmp_path, source), [sample(ground_truth="x")]) == [expected]


def test_verl_with_arguments_of_the_config(tmp_path: Path) -> None:
    source = "def f(data_source, solution_str, ground_truth, extra_info, scale): return scale\n"
    one = reward(tmp_path, source, arguments={"scale": 3})
    assert values(one, [sample(ground_truth="x", level=1)]) == [3.0]


def test_openrlhf(tmp_path: Path) -> None:
    one = reward(tmp_path, OPENRLHF, "reward_func")
    chat = [{"role": "system", "content": "Be."}, {"role": "user", "content": "Hi"}]
    samples = [
        sample("4", prompt="2+2=", labels="4", level=1),
        sample("5", prompt="2+2=", labels="4"),
        sample("yes", prompt=chat, answer="yes"),
    ]
    assert values(one, samples) == [1.0, 0.0, 1.0]
    with pytest.raises(RewardError, match="needs the column answer"):
        one.check([(None, {"question": "x"})])


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("[0.5]", 0.5),
        ("{'rewards': [2]}", 2.0),
        ("{'scores': [2]}", "f returned a dict without rewards: scores"),
        ("{'rewards': [1, 2]}", "f returned 2 values for 1 completions"),
    ],
)
def test_what_openrlhf_functions_return(tmp_path: Path, returned: str, expected: Any) -> None:
    source = f"def f(queries, prompts, labels):\n    return {returned}\n"
    assert values(reward(tmp_path, source), [sample(label="x")]) == [expected]


def test_tensors_become_numbers_in_the_worker(tmp_path: Path) -> None:
    source = """
        import torch
        def f(queries, prompts, labels):
            return torch.tensor([1.5] * len(queries))
    """
    one = reward(tmp_path, source, timeout_s=60)
    assert values(one, [sample(answer="x"), sample(answer="y")]) == [1.5, 1.5]


def test_areal(tmp_path: Path) -> None:
    one = reward(tmp_path, AREAL, "reward_fn")
    samples = [sample("it is 4", answer="4"), sample("5", answer="4", level=2), sample("show")]
    assert values(one, samples)[:2] == [1.0, 0.0]
    (shown,) = values(one, [sample("show", prompt="2+2", answer="4", level=2)])
    assert shown == "reward_fn raised ValueError: 2+2 None [1, 2] ['level']"
    with pytest.raises(RewardError, match="needs the column answer"):
        one.check([(None, {"level": 2})])


def test_shape_by_name_and_parameters_by_position(tmp_path: Path) -> None:
    source = """
        def f(a, b, c, d, answer, completions=None):
            return float((a, b, c, d, answer, completions) == ("p", "ok", None, [1, 2], "4", None))
        def g(query, prompt, label, /):
            return [float((q, p, l) == ("pok", "p", "4")) for q, p, l in zip(query, prompt, label)]
    """
    row = sample(answer="4", b="a column of that name")
    assert values(reward(tmp_path, source, shape="areal"), [row]) == [1.0]
    assert values(reward(tmp_path, source, "g", shape="openrlhf"), [row, row]) == [1.0, 1.0]
    with pytest.raises(RewardError, match=r"takes 3 parameters; with shape areal it must look"):
        reward(tmp_path, source, "g", shape="areal")


def test_one_sample_a_call_spares_the_others(tmp_path: Path) -> None:
    source = """
        import time
        def f(solution_str, ground_truth):
            time.sleep(20 if solution_str == "slow" else 0)
            return 1 / int(ground_truth)
    """
    one = reward(tmp_path, source, timeout_s=0.2)
    samples = [sample(answer="1"), sample("slow", answer="1"), sample(answer="0")]
    verdicts = scored(one, samples)
    assert [isinstance(verdict, Failed) for verdict in verdicts] == [False, True, True]
    assert "ZeroDivisionError" in str(verdicts[2])


def test_only_what_is_taken_is_sent() -> None:
    """Columns that the function does not take need not even be picklable."""
    binding = Binding(RewardConfig(function="m:f"), parameters("completions", "answer"))
    row = RewardInput(
        prompt="p",
        completion="c",
        completion_tokens=(1,),
        finish_reason="stop",
        columns={"answer": "4", "file": object()},
    )
    args, named = binding.bind([row])
    assert json.dumps([args, named]) == '[[], {"answer": ["4"], "completions": ["c"]}]'
