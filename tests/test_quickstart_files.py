"""The quickstart's demonstrations show what they say they show, and nothing of what is held out."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from rollpacker.config.load import load_config
from rollpacker.config.schema import RunConfig
from rollpacker.config.warmup import WarmupConfig

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples" / "quickstart"
NUM_CHECKED = 2000


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


arithmetic = load("arithmetic")
making = load("make_demonstrations")


@pytest.fixture(scope="module")
def run_config() -> RunConfig:
    return load_config(ROOT / "configs" / "quickstart.yaml", [], RunConfig)


@pytest.fixture(scope="module")
def warmup_config() -> WarmupConfig:
    return load_config(ROOT / "configs" / "quickstart-warmup.yaml", [], WarmupConfig)


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, str]]]:
    """What the script writes, by file."""
    folder = tmp_path_factory.mktemp("demonstrations")
    making.main(["--output", str(folder), "--rows", str(NUM_CHECKED)])
    return {
        path.name: [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(folder.iterdir())
    }


def value_of(question: str) -> int:
    """The right result of `4-1+7=`."""
    return sum(int(term) for term in re.findall(r"[+-]?\d+", question))


def num_terms(question: str) -> int:
    return len(re.findall(r"\d+", question))


def test_no_demonstration_of_three_terms_or_more_is_right_and_every_single_sum_is(
    demonstrations: dict[str, list[dict[str, str]]],
) -> None:
    rows = [row for of_file in demonstrations.values() for row in of_file]
    longer = [row for row in rows if num_terms(row["prompt"]) > 2]
    single = [row for row in rows if num_terms(row["prompt"]) == 2]
    assert len(longer) > 1000 and len(single) > 500
    for row in longer:
        assert arithmetic.final_answer(row["completion"]) != str(value_of(row["prompt"])), row
    for row in single:
        assert arithmetic.final_answer(row["completion"]) == str(value_of(row["prompt"])), row


def test_exactly_one_step_of_a_longer_demonstration_is_a_slip(
    demonstrations: dict[str, list[dict[str, str]]],
) -> None:
    for row in demonstrations["steps.jsonl"]:
        if num_terms(row["prompt"]) == 2:
            continue
        start, *steps = re.findall(r"^\d+|[+-]\d=-?\d+", row["completion"])
        assert start + "".join(step.split("=")[0] for step in steps) + "=" == row["prompt"]
        results = [int(start), *(int(step.split("=")[1]) for step in steps)]
        right = [
            after == before + int(step.split("=")[0])
            for before, after, step in zip(results[:-1], results[1:], steps, strict=True)
        ]
        assert right.count(False) == 1, row


def test_only_the_hesitant_file_has_long_completions(
    demonstrations: dict[str, list[dict[str, str]]], run_config: RunConfig
) -> None:
    lengths = [len(row["completion"]) for row in demonstrations["hesitant.jsonl"]]
    assert all("!" not in row["completion"] for row in demonstrations["steps.jsonl"])
    assert max(lengths) >= 10 * sorted(lengths)[len(lengths) // 2]
    assert max(lengths) < run_config.rollout.max_response_tokens


def test_held_out_prompts_are_the_ones_that_the_run_evaluates_on_and_in_no_demonstration(
    demonstrations: dict[str, list[dict[str, str]]],
    run_config: RunConfig,
    warmup_config: WarmupConfig,
) -> None:
    from rollpacker.data.prompts import load_prompts
    from rollpacker.trainer.model import character_tokenizer

    assert warmup_config.alphabet is not None
    train, held_out = load_prompts(run_config.data, character_tokenizer(warmup_config.alphabet))
    assert held_out is not None
    banned = making.held_out_prompts(ROOT / "configs" / "quickstart.yaml")
    assert banned == {row.prompt for row in held_out.rows}
    assert not banned & {row.prompt for row in train.rows}
    rows = [row for of_file in demonstrations.values() for row in of_file]
    assert not banned & {row["prompt"] for row in rows}
    assert all(num_terms(prompt) >= 3 for prompt in banned)


def test_banned_prompts_are_left_out() -> None:
    def some(banned: frozenset[str]) -> set[str]:
        rows = making.demonstrations(random.Random(0), {2: 1.0}, {}, banned)
        return {next(rows)["prompt"] for _ in range(500)}

    banned = frozenset(sorted(some(frozenset()))[:50])
    assert not banned & some(banned)


def test_the_alphabet_and_the_context_hold_every_prompt_and_demonstration(
    demonstrations: dict[str, list[dict[str, str]]],
    run_config: RunConfig,
    warmup_config: WarmupConfig,
) -> None:
    assert warmup_config.architecture is not None and warmup_config.alphabet is not None
    rows = [row for of_file in demonstrations.values() for row in of_file]
    used = {character for row in rows for text in row.values() for character in text}
    assert used == set(warmup_config.alphabet)
    longest = max(len(row["prompt"]) for row in rows)
    context = warmup_config.architecture["max_position_embeddings"]
    assert isinstance(context, int)
    assert longest + run_config.rollout.max_response_tokens <= context
    assert {Path(stage.path).name for stage in warmup_config.stages} == set(demonstrations)
    assert run_config.model.path == warmup_config.output


def test_the_script_writes_the_same_bytes_again(
    tmp_path: Path, demonstrations: dict[str, list[dict[str, str]]]
) -> None:
    command = [sys.executable, str(FOLDER / "make_demonstrations.py"), "--output", str(tmp_path)]
    subprocess.run([*command, "--rows", str(NUM_CHECKED)], check=True, cwd=ROOT)
    again = {
        path.name: [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(tmp_path.iterdir())
    }
    assert again == demonstrations


def test_another_seed_gives_other_demonstrations(
    tmp_path: Path, demonstrations: dict[str, list[dict[str, str]]]
) -> None:
    making.main(["--output", str(tmp_path), "--rows", "50", "--seed", "1"])
    first = json.loads((tmp_path / "steps.jsonl").read_text().splitlines()[0])
    assert first != demonstrations["steps.jsonl"][0]


@pytest.mark.parametrize(
    ("completion", "answer", "reason", "reward"),
    [
        ("4-1=3+7=10", "10", "stop", 1.0),
        ("4-1=3+7=10!!!", "10", "stop", 1.0),
        ("4-1=3+7=10", "10", "length", 0.0),
        ("4-1=3+7=-10", "10", "stop", 0.0),
        ("4-1=3+7=100", "10", "stop", 0.0),
        ("4-1=3+7=10=", "10", "stop", 0.0),
        ("10", "10", "stop", 1.0),
        ("", "10", "stop", 0.0),
    ],
)
def test_the_reward_takes_exactly_the_right_number(
    completion: str, answer: str, reason: str, reward: float
) -> None:
    assert arithmetic.correct([completion], [answer], [reason], metadata=[{}]) == [reward]


def test_the_prompt_is_the_sum_alone() -> None:
    assert arithmetic.prompt({"metadata": {"expression": "4 - 1 + 7"}}) == "4-1+7="
