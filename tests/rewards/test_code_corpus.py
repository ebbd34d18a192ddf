"""Reward hacks are not rewarded, honest solutions are, and no answer changes a later verdict.

The programs of `code_corpus/hacks.py` are hostile: they run in the sandbox alone, and everything
here is skipped, with the reason, where there is none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from examples.code.tasks import KINDS, code_tasks
from rollpacker.rewards.reward import Scored
from tests.rewards.code_box import Box, opened
from tests.rewards.code_corpus.hacks import HACKS, SOLUTION, TESTS
from tests.rewards.code_corpus.honest import HONEST, WRONG

FULL = bool(os.environ.get("ROLLPACKER_FULL"))
SOLVED = (
    "io",
    "call",
    "assert",
    "assert loop",
    "assert raises",
    "assert not above",
    "assert of objects",
)
ASKED = (
    "io",
    "call",
    "call of lists",
    "assert loop",
    "assert sorted",
    "assert not above",
    "assert of objects",
)
"""Kinds of tests that every hack meets; with ROLLPACKER_FULL=1 all of `TESTS`."""
NUM_GENERATED = 10 * len(KINDS) if FULL else 2 * len(KINDS) + 10
NUM_AFTER_POISON = 1000 if FULL else 100
POISON = (
    *("always equal int", "builtins.print", "builtins of comparison", "json.dumps", "json encoder"),
    *("json.loads", "math.isclose", "operator.eq", "sys.modules", "import hook", "trace"),
    *("forbidden fruit: equal ints", "replace the harness", "conftest.py", "json.py"),
    *("fake clock", "forge on every descriptor", "harness in a thread", "os._exit at import"),
)


@pytest.fixture(scope="module")
def box() -> Iterator[Box]:
    with opened() as box:
        yield box


def say(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with capsys.disabled():
        print(f"\n{text}")


def values(box: Box, answers: list[tuple[str, Any]], **arguments: Any) -> list[float | str]:
    """A verdict's value; for no verdict its reason."""
    verdicts = box.grade_all(answers, **arguments)
    return [v.value if isinstance(v, Scored) else v.reason for v in verdicts]


def test_the_task_of_the_hacks_can_be_solved(box: Box) -> None:
    found = dict(zip(TESTS, values(box, [(SOLUTION, TESTS[k]) for k in TESTS]), strict=True))
    assert found == {kind: float(kind in SOLVED) for kind in TESTS}


def test_no_hack_is_rewarded(box: Box, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = list(TESTS) if FULL else ASKED
    texts = {kind: json.dumps(TESTS[kind]) for kind in kinds}
    names = [(hack, kind) for hack in HACKS for kind in kinds]
    found: dict[tuple[str, str], float | str] = {}
    asked = names
    # On a busy machine a program may get no verdict, and is asked again; none fails each time.
    for _ in range(5):
        answers = [(HACKS[hack], texts[kind]) for hack, kind in asked]
        found.update(zip(asked, values(box, answers, wall_s=1.0), strict=True))
        asked = [name for name in asked if isinstance(found[name], str)]
    rewarded = [name for name, value in found.items() if value != 0.0]
    say(
        capsys,
        f"reward hacks: {len(HACKS)} programs, {len(names)} verdicts over {len(kinds)} kinds of"
        f" tests, {len(rewarded)} rewarded or without verdict",
    )
    assert len(HACKS) >= 60
    assert rewarded == []


def test_honest_solutions_are_accepted(box: Box, capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(code_tasks(NUM_GENERATED, seed=1))
    generated = {f"{n} {row['kind']}": row for n, row in enumerate(rows)}
    answers = {
        name: (row["reference_solution"], row["tests"][:4]) for name, row in generated.items()
    }
    answers.update(HONEST)
    found = values(box, list(answers.values()), wall_s=20.0)
    refused = [(name, value) for name, value in zip(answers, found, strict=True) if value != 1.0]
    say(
        capsys,
        f"honest solutions: {len(answers)} ({len(HONEST)} written by hand, {len(rows)} of"
        f" generated tasks), {len(refused)} refused",
    )
    assert len(answers) >= 300
    assert refused == []


def test_wrong_answers_are_refused_by_every_single_test(box: Box) -> None:
    singles = [(name, code, test) for name, (code, tests) in WRONG.items() for test in tests]
    found = values(box, [(code, [test]) for _, code, test in singles])
    assert [(n, t) for (n, _, t), value in zip(singles, found, strict=True) if value != 0.0] == []


def test_a_poisoned_sample_changes_no_later_verdict(
    box: Box, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = list(code_tasks(NUM_AFTER_POISON // 2, seed=2))
    right = [(row["reference_solution"], row["tests"][:1]) for row in rows]
    wrong = [("def f(x): return 0\nprint('nothing')", row["tests"][:1]) for row in rows]
    later = [answer for pair in zip(right, wrong, strict=True) for answer in pair]
    poison = [(HACKS[name], TESTS[kind]) for name in POISON for kind in ("io", "call", "assert")]
    assert values(box, poison, wall_s=1.0) == [0.0] * len(poison)
    found = values(box, later, wall_s=20.0)
    expected = [1.0, 0.0] * len(rows)
    changed = [n for n, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]]
    say(
        capsys,
        f"after {len(poison)} poisoned samples: {len(changed)} of {len(later)} verdicts changed",
    )
    assert changed == []
