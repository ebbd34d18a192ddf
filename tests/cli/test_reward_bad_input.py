"""Rewards that are set up wrongly or go wrong, as the user of `rollpacker train` sees it: one
message that names the mistake, the right exit code, and nothing that runs on.

Programs are judged without isolation here, by PATH without bubblewrap: what isolates has tests of
its own, and these need none."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from rollpacker.sandbox.sandbox import I_ACCEPT
from tests.cli.test_bad_input import GOOD, Command, command, model

__all__ = ["command", "model"]

UNSANDBOXED = {"allow_unsandboxed_code": I_ACCEPT}
TESTS = [{"type": "call", "function": "f", "args": [3], "expected": 6}]
ANSWER = "def f(x):\n    return 2 * x\n"


@pytest.fixture
def no_bubblewrap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


def code_rows(**changes: Any) -> list[dict[str, Any]]:
    """Six rows; a key such as `tests_3` sets that column of that row, None removes it."""
    rows: list[dict[str, Any]] = [
        {"prompt": f"{n}+1=", "tests": TESTS, "solution": ANSWER, "task": "code"} for n in range(6)
    ]
    for key, value in changes.items():
        column, _, number = key.rpartition("_")
        rows[int(number)][column] = value
        if value is None:
            del rows[int(number)][column]
    return rows


def code(**arguments: Any) -> dict[str, Any]:
    return {"function": "code", "tasks": ["code"], "arguments": arguments}


# Functions.


def test_a_dry_run_tries_functions_and_says_what_it_does_not_try(command: Command) -> None:
    missing = command.reward("def f(completions, missing_column):\n    return [1.0, 1.0]\n")
    assert command.train("--dry-run", rewards=[missing]) == 2
    assert "reward f needs the column missing_column" in command.err
    assert "first prompt" in command.out  # what there is to see is seen
    wrong = command.reward("def f(completions):\n    return [one.nothing for one in completions]\n")
    assert command.train("--dry-run", rewards=[wrong]) == 2
    assert "raised AttributeError on a test completion" in command.err
    doubtful = command.reward("def f(completions):\n    return [1 / 0 for _ in completions]\n")
    judge = {"function": "judge", "tasks": ["other"], "arguments": {"url": "http://127.0.0.1:9/"}}
    assert command.train("--dry-run", rewards=[doubtful, judge]) == 0
    assert "raised ZeroDivisionError on a test completion" in command.out
    assert "rewards  f: tried on made-up completions" in command.out
    assert "rewards  judge: not tried (doctor and train do)" in command.out
    assert command.train("--dry-run", rewards=[command.reward(GOOD) | {"tasks": ["other"]}]) == 0
    assert "reward.py:f: not tried" in command.out and "f: tried" not in command.out


def test_two_rewards_of_one_name_and_which_to_rename(command: Command) -> None:
    entry = command.reward(GOOD)
    said = command.refused(rewards=[entry, entry])
    assert 'two rewards are called "f"' in said and "rewards.1.name" in said


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rewards.0.workers=0", "must be at least 1, or auto, not 0"),
        ("rewards.0.tasks=[]", "must name at least one task"),
        ("rewards.0.weight=.nan", "Allowed: a number"),
        ("rewards.0.deadline={max_s: -1}", "rewards.0.deadline"),
        ("reward_scheduler.order=closests", 'Did you mean "closest"?'),
        ("reward_scheduler.max_retries=-1", "must be at least 0"),
        ("rollout.dynamic_sampling.max_refills=-1", "must be at least 0"),
        ("rollout.dynamic_sampling.max_refill=2", 'Did you mean "max_refills"?'),
        ("rewards.0.function=mathh", 'Did you mean "math"?'),
        ("sandbox.allow_unsandboxed_code=sure", "must be exactly"),
    ],
)
def test_a_mistake_in_the_rewards_part_of_the_config(
    command: Command, override: str, message: str
) -> None:
    assert message in command.refused(override)


@pytest.mark.parametrize(
    ("tasks", "rows", "message"),
    [
        (["sum"], ["sums"], "row 0: task 'sums' is named by no reward; did you mean \"sum\"?"),
        (["sum"], ["sum", None], "row 1: there is no task, and every reward names its tasks (sum)"),
    ],
)
def test_a_row_that_no_reward_judges(
    command: Command, tasks: list[str], rows: list[str | None], message: str
) -> None:
    lines = [{"prompt": "1+1="} | ({"task": task} if task else {}) for task in rows]
    entry = {**command.reward(GOOD), "tasks": tasks}
    assert message in command.refused(rewards=[entry], data__train__path=command.rows(*lines))


def test_a_reward_that_judges_no_row_is_pointed_out(command: Command, caplog) -> None:
    """Where another reward judges every row nothing else would tell."""
    lines = [{"prompt": f"{n}+1=", "task": "openai/gsm8k"} for n in range(12)]
    entry = command.reward(GOOD)
    rewards = [entry, {**entry, "name": "extra", "tasks": ["math"]}]
    path = command.rows(*lines)
    assert command.train(rewards=rewards, data__train__path=path, train__steps=1) == 0
    assert (
        "reward extra judges none of these 12 rows: it names the tasks 'math', the rows have"
        " 'openai/gsm8k'" in caplog.text
    )


def test_no_signal_ever_ends_the_run_with_the_reason(command: Command) -> None:
    entry = command.reward("def f(completions, **columns): return [1.0] * len(completions)\n")
    changes = {"rollout__dynamic_sampling": {"enabled": True}, "train__steps": 6}
    assert command.train(rewards=[entry], **changes) == 7
    assert "no signal: all its rewards are equal" in command.err


def test_what_a_reward_forks_is_ended_with_it(command: Command) -> None:
    pids = command.folder / "pids"
    body = (
        "import os, time\n"
        "def f(completions, **columns):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        if os.fork() == 0:\n"
        f"            print(os.getpid(), file=open({str(pids)!r}, 'a'), flush=True)\n"
        "            time.sleep(600)\n"
        "        os._exit(0)\n"
        f"    while not os.path.exists({str(pids)!r}): time.sleep(0.01)\n"
        "    return [float(len(c) % 3) for c in completions]\n"
    )
    assert command.train(rewards=[command.reward(body)], train__steps=1) == 0
    left = [pid for pid in map(int, pids.read_text().split()) if _runs(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# Code.


def test_no_sandbox_no_run(command: Command, no_bubblewrap: None) -> None:
    path = command.rows(*code_rows())
    said = command.refused(rewards=[code()], data__train__path=path)
    assert "bwrap (bubblewrap) is not installed" in said and "sandbox.url" in said


def test_without_isolation_everything_is_marked(
    command: Command, no_bubblewrap: None, caplog
) -> None:
    settings = {
        "rewards": [code(), command.reward(GOOD)],
        "data__train__path": command.rows(*code_rows()),
        "sandbox": UNSANDBOXED,
        "train__steps": 1,
    }
    assert command.train(**settings) == 0
    lines = (command.run / "metrics.jsonl").read_text().splitlines()
    assert lines and all(json.loads(line)["unsandboxed"] for line in lines)
    assert json.loads((command.run / "summary.json").read_text())["unsandboxed"] is True
    assert "ran WITHOUT isolation in this run" in command.out
    told = [r.getMessage() for r in caplog.records if "WITHOUT ISOLATION" in r.getMessage()]
    assert len(told) == 1 and "\n" not in told[0]


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        (
            {"solution_1": "def f(x): return x", "solution_4": "def f(x: return"},
            {"reference_column": "solution"},
            "the tests of 2 of 6 rows fail their own reference solution: rows 1, 4: test 0",
        ),
        ({"tests_2": '[{"type": "call", '}, {}, "1 of 6 rows cannot be used: row 2: no JSON"),
        ({"tests_2": []}, {}, "row 2: there is no test"),
        ({"tests_5": None}, {}, "row 5: no column tests"),
        ({}, {"tests_column": "test"}, "6 of 6 rows cannot be used: rows 0, 1, 2, 3, 4: no column"),
        ({}, {"reference_column": "solutions"}, 'Did you mean "solution"?'),
        ({}, {"max_test": 3}, 'Did you mean "max_tests"?'),
    ],
)
def test_code_rows_that_cannot_be_used(
    command: Command,
    no_bubblewrap: None,
    changes: dict[str, Any],
    arguments: dict[str, Any],
    message: str,
) -> None:
    path = command.rows(*code_rows(**changes))
    settings = {"data__train__path": path, "sandbox": UNSANDBOXED}
    assert message in command.refused(rewards=[code(**arguments)], **settings)


# Judges and reward models.


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _judge(**arguments: Any) -> dict[str, Any]:
    rows = {"reference_column": None, **arguments}
    return {"function": "judge", "timeout_s": 5, "arguments": rows}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "needs either url (of an endpoint) or model_path"),
        ({"url": "ftp://x", "model": "m"}, 'url "ftp://x" is no address'),
        ({"url": "http://127.0.0.1:1/v1"}, "url needs model"),
        ({"url": "http://127.0.0.1:1/v1", "model": "m", "token_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY"),
        ({"model_path": "nowhere"}, "model_path nowhere is no model folder"),
    ],
)
def test_a_judge_that_cannot_be_used(
    command: Command, arguments: dict[str, Any], message: str
) -> None:
    assert message in command.refused(rewards=[_judge(**arguments)])


def test_a_judge_that_never_answers_is_one_reason_and_not_one_for_each_second(
    command: Command, caplog
) -> None:
    url = f"http://127.0.0.1:{_free_port()}/v1"
    arguments = {"url": url, "model": "m", "probe": False, "outage_s": 0.6}
    changes = {
        "reward_scheduler__max_retries": 0,
        "rollout__samples_per_prompt": 4,
        "train__steps": 6,
    }
    assert command.train(rewards=[_judge(**arguments)], **changes) == 7
    assert f"the judge at {url} was down for longer than outage_s=0.6 (" in command.err
    told = [r.getMessage() for r in caplog.records if "no use for a sample" in r.getMessage()]
    assert len(told) == 1


def test_a_language_model_is_no_reward_model(command: Command, model: Path) -> None:
    entry = {"function": "reward_model", "arguments": {"model_path": str(model)}}
    assert "a reward model has one" in command.refused(rewards=[entry])
