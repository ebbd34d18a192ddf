"""Before and after in the summary: like with like, with an evaluation's standard error."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest
from rich.console import Console

from rollpacker.core.commands import Finish, RoundKind
from rollpacker.core.events import Committed
from rollpacker.core.records import Note, Record
from rollpacker.report.page.health import findings
from rollpacker.report.summary import RunSummary
from rollpacker.report.summary_table import render
from tests.report.fake_run import FakeRun


def summarized(steps: int) -> tuple[dict[str, Any], list[tuple[RoundKind | None, float]]]:
    """A run's summary, and kind and mean reward of its steps."""
    summary, found = RunSummary(), []
    for entry in FakeRun(seed=1).run(steps):
        committed = summary.feed(entry)
        if committed is not None:
            assert committed[1].rewards.mean is not None
            found.append((committed[1].kind, committed[1].rewards.mean))
    return summary.plain(), found


def text(summary: dict[str, Any]) -> str:
    console = Console(width=80, force_terminal=False)
    with console.capture() as capture:
        console.print(render(summary))
    return capture.get()


def test_the_training_reward_compares_rounds_of_one_kind() -> None:
    summary, steps = summarized(40)
    short = [reward for kind, reward in steps if kind == RoundKind.SHORT]
    assert len(short) < 40 and RoundKind.LONG in [kind for kind, _ in steps[-5:]]
    expected = {"first": fmean(short[:5]), "last": fmean(short[-5:]), "kind": "short"}
    assert summary["training_reward"] == expected
    assert "training reward (first, last 5 short rounds)" in text(summary)


def test_rounds_that_overlap_are_not_compared() -> None:
    summary, steps = summarized(9)
    assert len(steps) == 9
    assert summary["training_reward"] == {"first": None, "last": None}
    assert "training reward" not in text(summary)
    assert "learning" in text(summary)
    assert "learning" not in text({**summary, "evaluations": []}), "a table without a row"


def evaluated(first: float, last: float, errors: tuple[float | None, float | None]) -> dict:
    summary, _ = summarized(1)
    summary["evaluations"] = [
        {"step": step, "eval/pass@1": value, "eval/reward": value}
        | ({} if error is None else {"eval/stderr/pass@1": error})
        for step, value, error in zip((0, 1), (first, last), errors, strict=True)
    ]
    return summary


@pytest.mark.parametrize(
    ("last", "errors", "level"),
    [
        (0.56, (0.03, 0.03), "note"),  # two standard errors of the difference are 0.085
        (0.60, (0.03, 0.03), "good"),
        (0.56, (0.03, None), "good"),  # an evaluation of before this was known
        (0.48, (0.03, 0.03), "note"),
        (0.30, (0.03, 0.03), "warning"),
    ],
)
def test_a_change_within_two_standard_errors_is_not_good_news(last, errors, level) -> None:
    found = findings(evaluated(0.5, last, errors), {})
    [one] = [finding for finding in found if "pass@1" in finding.text]
    assert one.level == level
    chance = "within two standard errors" in one.text
    assert chance is (None not in errors and abs(last - 0.5) < 0.08)


def test_responses_without_a_verdict_are_told_of_how_many() -> None:
    summary = evaluated(0.5, 0.56, (None, None))
    samples = {"launched": 120, "aborted": 6, "failed": 2, "trained": 96}
    reasons = {"slow": 1, "vowels: no answer in a row of the class \x1b[2J": 15}
    summary["samples"] |= samples | {"no_verdict": reasons}
    for one in summary["evaluations"]:
        one |= {"eval/no_verdict": 16.0, "eval/samples": 112.0}
    shown = text(summary)
    assert shown.count("16 of 112") == 3  # before, after, and in training
    told = "16 of 112 responses were left without a verdict, most: vowels: no answer in a row of"
    assert told in " ".join(shown.split()) and "\x1b" not in shown
    summary["samples"]["no_verdict"] = {"slow": 2}  # less than 2 % of 112
    for one in summary["evaluations"]:
        del one["eval/samples"]  # an earlier version's
    assert "left without" not in text(summary) and "16 of" not in text(summary)


def test_the_table_has_the_standard_error_beside_it() -> None:
    shown = text(evaluated(0.5, 0.56, (0.031, 0.029)))
    assert "0.500 ± 0.031" in shown and "0.560 ± 0.029" in shown and "+0.060" in shown
    assert "±" not in text(evaluated(0.5, 0.56, (None, None)))


def test_a_run_that_failed_has_not_finished() -> None:
    why = "engine 0 was lost 3 times without a committed step between them"
    summary = RunSummary()
    for entry in FakeRun(seed=1).run(3):
        if isinstance(entry, Record) and any(isinstance(one, Finish) for one in entry.commands):
            end = (Finish(reason=why, failed=True),)
            entry = Record(time_s=entry.time_s, event=entry.event, commands=end, cost_s=0.0)
        summary.feed(entry)
    plain = summary.plain()
    assert (plain["finished"], plain["failed"]) == (None, why)
    assert f"failed: {why}" in " ".join(text(plain).split())
    assert findings(plain, {})[0].level == "bad" and why in findings(plain, {})[0].text


def test_what_resumes_salvaged_is_told() -> None:
    summary = RunSummary()
    for entry in FakeRun(seed=1).run(3):
        if isinstance(entry, Record) and isinstance(entry.event, Committed):
            counts = {"perf/salvaged_samples": 3.0, "perf/salvaged_tokens": 1000.0}
            note = Note(time_s=entry.time_s, name="salvaged", seconds=0.0, step=0, metrics=counts)
            summary.feed(note)
            summary.feed(note)
        summary.feed(entry)
    assert summary.plain()["salvaged"] == {"samples": 18, "tokens": 6000}
    assert "18 responses (6,000 tokens)" in " ".join(text(summary.plain()).split())
