"""`rollpacker compare`: runs beside each other, in a terminal and in a browser."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rollpacker.cli.main import main
from rollpacker.report.page.compare import render_comparison
from rollpacker.report.page.paired import paired_differences
from rollpacker.report.page.run_book import read_run
from tests.report.page.browser import opened
from tests.report.page.runs import write_run

LOGS = Path(__file__).parents[2] / "golden" / "logs"


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
    out = tmp_path / "compare.html"
    assert main(["compare", *map(str, runs), "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "tail idle" in text and "training" in text
    assert "callbacks" not in text  # neither run called any
    assert "minus the first run's" not in text  # nothing saved, nothing paired
    with opened(out.as_uri()) as (page, seen):
        seconds = page.inner_text("#time table")
        assert "tail idle" in seconds and "callbacks" not in seconds and "\u2013" not in seconds
        assert page.locator("#learning canvas").count() > 3
        assert page.locator("text=coincides with").count() == 0
        assert seen.errors == []


def test_the_same_prompts_are_paired_and_same_curves_told(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    runs = [write_run(tmp_path / name, steps=6) for name in ("one", "two")]
    out = tmp_path / "compare.html"
    assert main(["compare", *map(str, runs), "--out", str(out)]) == 0
    assert "+0.000 ± 0.000 (5 prompts)" in capsys.readouterr().out
    with opened(out.as_uri()) as (page, seen):
        assert "+0.000 ± 0.000 (5 prompts)" in page.inner_text("#overview")
        assert "two (coincides with one)" in page.inner_text("#learning .legend >> nth=0")
        assert seen.errors == []


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
    first, second, *rest = paired_differences([one, two, other, silent, none])
    assert first is None and rest == [None, None, None]
    assert second is not None
    # Differences 0.5, 1 and 0: their mean 0.5, their deviation 0.5, over the root of three.
    assert second["difference"] == pytest.approx(0.5)
    assert second["error"] == pytest.approx(0.5 / 3**0.5)
    assert second["prompts"] == 3 and second["steps"] == [4, 4]


def test_a_key_is_told_whole(tmp_path: Path) -> None:
    key = "algorithm.advantage_normalization_of_each_prompt"
    runs = [read_run(write_run(tmp_path / name, steps=2)).plain() for name in ("one", "two")]
    for run, value in zip(
        runs, ("some/rather/long/path/of/a/function.py:advantage", "grpo"), strict=True
    ):
        run["settings"] = [[key, value, None]]
    console = Console(width=80, record=True)
    console.print(render_comparison(runs))
    assert key in console.export_text()
