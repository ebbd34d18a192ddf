"""Samples of a run in the terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollpacker.cli.main import main
from rollpacker.report.sample_view import lines_of
from tests.report.page.runs import HOSTILE, write_run
from tests.report.page.test_dialogue import DIALOGUE
from tests.report.test_hostile import forbidden


def test_a_dialogue_is_told_turn_by_turn_and_steers_no_terminal() -> None:
    row = {"sample_id": HOSTILE, "step": 3, "reward": 1.5, "num_tokens": 4}
    row |= {"finish_reason": "turns", "dialogue": json.dumps(DIALOGUE), "rendered_prompt": "x"}
    lines = [line for line, _ in lines_of(row)]
    assert forbidden("".join(lines)) == []
    assert "- turn 1, 2.000 s" in lines and "- environment, 0.250 s, reward 0.5" in lines
    assert "> The end." in lines and "  [system]" in lines
    assert "  ... 7 turns left out here ..." in lines and "- turn 9" in lines
    assert any(line.startswith("> calls {") for line in lines)


def test_so_many_of_the_newest_step_or_one_by_its_id(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(write_run(tmp_path / "run", steps=4, text=HOSTILE))
    assert main(["report", run, "--samples", "2"]) == 0
    told = capsys.readouterr().out
    heads = [line for line in told.splitlines() if ", ended by " in line]
    rewards = [float(head.split("reward ")[1].split(",")[0]) for head in heads]
    assert len(heads) == 2 and all("step 4" in head for head in heads)
    assert rewards[0] > rewards[1]
    assert forbidden(told) == []
    sample = heads[1].split("  ")[0]
    assert main(["report", run, "--samples", sample]) == 0
    assert capsys.readouterr().out.splitlines()[0] == heads[1]
    for which, message in (("0", "at least 1"), ("train/0/9#7.7", "has no sample")):
        assert main(["report", run, "--samples", which]) == 2
        assert message in capsys.readouterr().err


def test_a_run_without_samples_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path), "--samples"]) == 2
    assert "has no samples yet" in capsys.readouterr().err
