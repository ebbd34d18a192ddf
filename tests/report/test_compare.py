"""`rollpacker compare`: runs beside each other, in a terminal."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rollpacker.cli.main import main
from rollpacker.report.compare import (
    Compared,
    code_that_differs,
    paired_difference,
    read_compared,
    render_comparison,
    settings_that_differ,
)
from rollpacker.report.page.settings import Setting
from rollpacker.report.summary import RunSummary, summarize
from tests.report.page.runs import CONFIG, write_run

LOGS = Path(__file__).parents[1] / "golden" / "logs"


def recorded(folder: Path, name: str) -> Path:
    """The log of a run that took place."""
    folder.mkdir()
    (folder / "events.jsonl").write_bytes(gzip.decompress((LOGS / f"{name}.jsonl.gz").read_bytes()))
    return folder


def test_recorded_runs_beside_each_other(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    runs = [recorded(tmp_path / name, name) for name in ("plain", "tail")]
    assert main(["compare", *map(str, runs)]) == 0
    text = capsys.readouterr().out
    assert "tail idle" in text and "training" in text
    assert "callbacks" not in text  # neither run called any
    assert "minus the first run's" not in text  # nothing saved, nothing paired
    (wall,) = [line for line in text.splitlines() if line.startswith("wall time")]
    found = [summarize(run)["wall_s"] for run in runs]
    assert wall.split()[2::2] == [f"{seconds:.1f}" for seconds in found]


def test_the_same_prompts_are_paired(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    runs = [write_run(tmp_path / name, steps=6) for name in ("one", "two")]
    assert main(["compare", *map(str, runs)]) == 0
    text = capsys.readouterr().out
    assert "+0.000 ± 0.000 (5 prompts)" in text and "last, minus the first run's" in text


def evaluated(folder: Path, passed: dict[str, list[bool | None]], *, text: str = "") -> Path:
    import pyarrow
    import pyarrow.parquet

    rows = [
        {"step": 4, "prompt_id": prompt, "prompt": prompt + text, "passed": one}
        for prompt, of_prompt in passed.items()
        for one in of_prompt
    ]
    (folder / "evaluations").mkdir(parents=True)
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, folder / "evaluations" / "step_000004.parquet")
    return folder


def test_a_difference_has_the_error_of_its_pairs(tmp_path: Path) -> None:
    one = evaluated(tmp_path / "one", {"a": [True, False], "b": [False], "c": [True], "x": [True]})
    two = evaluated(tmp_path / "two", {"a": [True, True], "b": [True], "c": [True], "y": [False]})
    other = evaluated(tmp_path / "other", {"a": [True]}, text=" of another data set")
    silent = evaluated(tmp_path / "silent", {"a": [None]})
    none = tmp_path / "none"
    first, second, *rest = [compared(one) for one in (one, two, other, silent, none)]
    assert [paired_difference(first, run) for run in rest] == [None, None, None]
    found = paired_difference(first, second)
    assert found is not None
    # Differences 0.5, 1 and 0: their mean 0.5, their deviation 0.5, over the root of three.
    assert found.mean == pytest.approx(0.5) and found.prompts == 3
    assert found.error == pytest.approx(0.5 / 3**0.5)


def compared(folder: Path, **settings: str) -> Compared:
    """A run without a step, with what its folder has and these settings."""
    run = read_compared(folder, RunSummary().plain())
    given = {key: Setting(key, value, None) for key, value in settings.items()}
    return Compared(folder, run.summary, {**run.settings, **given}, run.passed, run.digests)


def test_a_key_is_told_whole(tmp_path: Path) -> None:
    key = "algorithm.advantage_normalization_of_each_prompt"
    values = ("some/rather/long/path/of/a/function.py:advantage", "grpo")
    runs = [compared(tmp_path / value[:4], **{key: value}) for value in values]
    console = Console(width=80, record=True)
    console.print(render_comparison(runs, width=80))
    assert key in console.export_text()


def test_a_run_at_the_default_shows_the_default(tmp_path: Path) -> None:
    """A run's name is no difference, and a long value is cut with its length told."""
    runs = [compared(tmp_path / name, name=name) for name in ("one", "two", "three")]
    rate = Setting("train.learning_rate", "0.1", "0.001")
    path = Setting("model.path", "m" * 300, None)
    for run, some in zip(runs, ([rate], [path], []), strict=True):
        run.settings.update({one.key: one for one in some})  # type: ignore[attr-defined] # a dict
    assert settings_that_differ(runs) == [
        ("train.learning_rate", ["0.1", "0.001", "0.001"]),
        ("model.path", ["not set", "m" * 200 + "… (300 characters)", "not set"]),
    ]


def settings_as_printed(text: str) -> dict[tuple[str, str], str]:
    """By run and key, from every table of settings that a comparison printed."""
    found: dict[tuple[str, str], str] = {}
    heads: list[str] = []
    for line in text.splitlines():
        if line.startswith("settings that differ"):
            heads = line.split()[3:]
        elif heads and len(words := line.split()) == 1 + len(heads):
            found |= {(head, words[0]): value for head, value in zip(heads, words[1:], strict=True)}
    return found


@pytest.mark.parametrize("columns", [None, 60, 80, 120])
def test_nothing_is_cropped_however_narrow(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, columns: int | None
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", str(columns))
    wanted: dict[tuple[str, str], str] = {}
    for number in range(6):
        run = write_run(tmp_path / f"quickstart-{number}", steps=2)
        config = (run / "config.yaml").read_text()
        of_run = {
            "train.steps": str(20 * 10**number),
            "rollout.max_response_tokens": str(1000 + number),
        }
        config = config.replace("steps: 30", f"steps: {of_run['train.steps']}")
        config = config.replace("384", of_run["rollout.max_response_tokens"])
        (run / "config.yaml").write_text(config)
        wanted |= {(run.name, key): value for key, value in of_run.items()}
    runs = [str(run) for run in sorted(tmp_path.glob("quickstart-*"))]
    assert main(["compare", *runs]) == 0
    text = capsys.readouterr().out
    assert settings_as_printed(text) == wanted
    if columns is not None:
        assert max(len(line) for line in text.splitlines()) <= columns


def with_code(run: Path, config: str, **digests: str) -> Path:
    (run / "config.yaml").write_text(config)
    (run / "identity.json").write_text(json.dumps({"files": digests}))
    return run


def test_code_that_differs_is_said(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    config = CONFIG + "algorithm: {advantage_function: 'mine/algo.py:mine'}\n"
    own, reward = "algorithm.advantage_function", "the reward exact"
    one = with_code(
        write_run(tmp_path / "one", steps=2), config, **{own: "11111111aaaa", reward: "5" * 64}
    )
    two = with_code(
        write_run(tmp_path / "two", steps=2), config, **{own: "22222222bbbb", reward: "5" * 64}
    )
    assert main(["compare", str(one), str(two)]) == 0
    text = capsys.readouterr().out
    (line,) = [line for line in text.splitlines() if "the code of" in line]
    assert line.split("  ")[0] == "the code of algorithm.advantage_function"
    assert "mine/algo.py (11111111)" in line and "mine/algo.py (22222222)" in line
    assert "the reward exact" not in text
    # A reward by its file; a run of before digests were written says nothing.
    with_code(one, CONFIG, **{reward: "5" * 64})
    with_code(two, CONFIG, **{reward: "6" * 64})
    three = write_run(tmp_path / "three", steps=2)
    assert code_that_differs([compared(run) for run in (one, two, three)]) == [
        (
            "the code of the reward exact",
            ["reward.py (55555555)", "reward.py (66666666)", "not known"],
        )
    ]
