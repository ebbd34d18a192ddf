"""The generated programming problems: many, different, reproducible, and worth asking."""

from __future__ import annotations

import importlib.util
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from examples.code.one_liners import (
    ALPHABET,
    ENDLESS,
    INPUTS,
    demonstrations,
    one_liners,
    write_demonstrations,
)
from examples.code.tasks import KINDS, NUM_TESTS, code_tasks
from examples.rows import write_rows

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return list(code_tasks(1200, seed=0))


def test_there_are_many_kinds_and_thousands_of_rows(rows: list[dict[str, Any]]) -> None:
    assert len(KINDS) >= 40 and len({kind.name for kind in KINDS}) == len(KINDS)
    counts = Counter(row["kind"] for row in rows)
    assert len(counts) == len(KINDS) and max(counts.values()) <= 2 * min(counts.values())
    assert len({row["prompt"] for row in rows}) == len(rows)
    assert len({row["reference_solution"] for row in rows}) > 500


def test_every_row_has_what_training_needs(rows: list[dict[str, Any]]) -> None:
    kinds = Counter()
    for row in rows:
        assert row["task"] == "code" and len(row["tests"]) == NUM_TESTS
        assert "$" not in row["prompt"] + row["reference_solution"]
        kinds.update(test["type"] for test in row["tests"])
        assert json.loads(json.dumps(row)) == row
    assert set(kinds) == {"io", "call", "assert"} and min(kinds.values()) > 500


def test_no_constant_passes_the_tests(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        expected = Counter(
            str(test.get("stdout", test.get("expected", test.get("expected_literal"))))
            for test in row["tests"]
            if test["type"] != "assert"
        )
        assert max(expected.values()) <= NUM_TESTS // 2, row


def test_the_example_of_the_prompt_is_not_a_test(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        for test in row["tests"]:
            if test["type"] == "io":
                assert f"Example input:\n{test['stdin']}Example" not in row["prompt"]
            elif test["type"] == "call":
                args = ", ".join(map(repr, test["args"]))
                assert f"Example: {test['function']}({args}) is" not in row["prompt"]


def number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None
    return int(found[1])


def rotate(prompt: str, xs: list[int]) -> list[int]:
    for _ in range(number(r"by (\d+) places", prompt)):
        xs = xs[1:] + xs[:1]
    return xs


def coins(prompt: str, n: int) -> int:
    a, b = number(r"coins of 1, (\d+)", prompt), number(r"\d and (\d+)", prompt)
    return sum(a * i + b * j <= n for i in range(n + 1) for j in range(n + 1))


def best_stretch(prompt: str, xs: list[int]) -> int:
    ends = [(i, j) for i in range(len(xs)) for j in range(i + 1, len(xs) + 1)]
    return max([number(r"counts (\d+)", prompt), *(sum(xs[i:j]) for i, j in ends)])


def base(prompt: str, n: int) -> str:
    k = number(r"in base (\d)", prompt)
    return (base(prompt, n // k) if n >= k else "") + str(n % k)


def differences(prompt: str, xs: list[int]) -> list[int]:
    k = number(r"xs\[i \+ (\d)\]", prompt)
    return [xs[i + k] - xs[i] for i in range(len(xs)) if i + k < len(xs)]


def caesar(prompt: str, s: str) -> str:
    k = number(r"by (\d+) places", prompt)
    letters = "abcdefghijklmnopqrstuvwxyz"
    return s.translate(str.maketrans(letters, letters[k:] + letters[:k]))


@pytest.mark.parametrize(
    "other", [rotate, coins, best_stretch, base, differences, caesar], ids=lambda f: f.__name__
)
def test_expected_values_agree_with_another_implementation(
    other: Callable[..., Any], rows: list[dict[str, Any]]
) -> None:
    found = [
        (test["args"], test["expected"], other(row["prompt"], *test["args"]))
        for row in rows
        if row["kind"] == other.__name__
        for test in row["tests"]
        if test["type"] == "call"
    ]
    assert found and [case for case in found if case[1] != case[2]] == []


def test_a_seed_always_makes_the_same_rows(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", code_tasks(60, 3))
    write_rows(tmp_path / "sub" / "b.jsonl", code_tasks(60, 3))
    write_rows(tmp_path / "c.jsonl", code_tasks(60, 4))
    a, b, c = ((tmp_path / name).read_text() for name in ("a.jsonl", "sub/b.jsonl", "c.jsonl"))
    assert a == b != c
    assert [json.loads(line) for line in a.splitlines()] == list(code_tasks(60, 3))


def test_one_liners_are_short_right_and_of_a_small_alphabet() -> None:
    rows = list(one_liners(2000, seed=0))
    assert len({row["prompt"] for row in rows}) == len(rows)
    for row in rows:
        assert len(row["prompt"]) <= 40 and len(row["reference_solution"]) <= 40
        assert set(row["prompt"] + row["reference_solution"]) <= set(ALPHABET)
        scope: dict[str, Any] = {}
        exec(row["reference_solution"], scope)
        assert [scope["f"](x) for x in INPUTS] == [test["expected"] for test in row["tests"]]
        assert len({str(test["expected"]) for test in row["tests"]}) > 1
    assert len(list(one_liners(6000, seed=0))) == 6000, "more than there are prompts: they repeat"


def test_demonstrations_have_the_shares_asked_for(tmp_path: Path) -> None:
    solutions = {row["prompt"]: row["reference_solution"] for row in one_liners(4026, seed=0)}
    banned = frozenset(list(solutions)[:100])
    rows = list(demonstrations(8000, 1, endless=0.05, wrong=0.3, banned=banned))
    endless = sum(row["completion"] in ENDLESS for row in rows)
    right = sum(row["completion"] == solutions[row["prompt"]] for row in rows)
    assert 0.04 < endless / len(rows) < 0.06
    assert 0.62 < right / len(rows) < 0.68
    assert not {row["prompt"] for row in rows} & banned
    assert set("".join(row["completion"] for row in rows)) <= set(ALPHABET)
    write_demonstrations(tmp_path / "d.jsonl", 50, 1, endless=0.0, wrong=0.0)
    for line in (tmp_path / "d.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert row["completion"] == solutions[row["prompt"]]


def load_example() -> ModuleType:
    path = ROOT / "examples" / "code" / "make_tasks.py"
    spec = importlib.util.spec_from_file_location("make_code_tasks", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_writes_disjoint_sets(tmp_path: Path) -> None:
    load_example().main(["--output", str(tmp_path), "--rows", "80", "--eval-rows", "20"])
    for folder in (tmp_path, tmp_path / "one-liners"):
        train, evaluation = (
            [json.loads(line)["prompt"] for line in (folder / name).read_text().splitlines()]
            for name in ("train.jsonl", "eval.jsonl")
        )
        assert (len(train), len(evaluation)) == (80, 20)
        assert not set(train) & set(evaluation)
    demonstrated = (tmp_path / "one-liners" / "demonstrations.jsonl").read_text().splitlines()
    assert not {json.loads(line)["prompt"] for line in demonstrated} & set(evaluation)
