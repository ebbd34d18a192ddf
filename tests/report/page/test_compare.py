"""`rollpacker compare`: runs beside each other, in a terminal and in a browser."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rollpacker.cli.main import main
from rollpacker.report.page.compare import render_comparison
from rollpacker.report.page.own_code import code_that_differs
from rollpacker.report.page.paired import paired_differences
from rollpacker.report.page.run_book import read_run
from rollpacker.report.page.seeds import seed_groups
from tests.report.page.browser import opened
from tests.report.page.runs import CONFIG, write_run

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
    console.print(render_comparison(runs, width=80))
    assert key in console.export_text()


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
    assert main(["compare", *runs, "--out", str(tmp_path / "compare.html")]) == 0
    text = capsys.readouterr().out
    assert settings_as_printed(text) == wanted
    if columns is not None:
        assert max(len(line) for line in text.splitlines() if str(tmp_path) not in line) <= columns


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
    out = tmp_path / "compare.html"
    assert main(["compare", str(one), str(two), "--out", str(out)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "the code of" in line]
    assert line.split("  ")[0] == "the code of algorithm.advantage_function"
    assert "mine/algo.py (11111111)" in line and "mine/algo.py (22222222)" in line
    with opened(out.as_uri()) as (page, seen):
        settings = page.inner_text("#settings")
        assert "mine/algo.py (22222222)" in settings and "the reward exact" not in settings
        assert seen.errors == []
    # A reward by its file; a run of before digests were written says nothing.
    with_code(one, CONFIG, **{reward: "5" * 64})
    with_code(two, CONFIG, **{reward: "6" * 64})
    three = write_run(tmp_path / "three", steps=2)
    runs = [read_run(run).plain() for run in (one, two, three)]
    assert code_that_differs([one, two, three], runs) == [
        [["the code of the reward exact", "reward.py (55555555)", None]],
        [["the code of the reward exact", "reward.py (66666666)", None]],
        [["the code of the reward exact", "not known", None]],
    ]


def told(name: str, passed: float | None, **settings: str) -> dict[str, Any]:
    """As much of a run as its group asks for."""
    rows = [] if passed is None else [{"step": 0}, {"step": 20, "eval/pass@1": passed}]
    settings = {"name": name, **settings}
    return {
        "name": name,
        "settings": [[key, value, None] for key, value in settings.items()],
        "summary": {"evaluations": rows},
    }


def test_runs_that_differ_in_their_seed_are_one_group() -> None:
    runs = [
        told("a1", 0.5, lr="1"),
        told("b1", 0.9, lr="2", seed="1"),
        told("a2", 0.6, lr="1", seed="2"),
        told("b2", 0.8, lr="2", seed="2"),
        told("a3", 0.7, lr="1", seed="3"),
        told("c", 0.4, lr="3"),
        told("d", None, lr="4"),
    ]
    one, two, alone, silent = seed_groups(runs)
    assert (one.names, one.steps) == (("a1", "a2", "a3"), (20,))
    assert one.mean == pytest.approx(0.6) and one.deviation == pytest.approx(0.1)
    assert one.difference is None and two.mean == pytest.approx(0.85)
    # Variances 0.01 of three runs and 0.005 of two.
    assert two.difference == pytest.approx(0.25)
    assert two.error == pytest.approx((0.01 / 3 + 0.005 / 2) ** 0.5)
    assert alone.difference == pytest.approx(-0.2) and alone.error is None
    assert silent.mean is None and silent.told_difference == "-"
    assert seed_groups([told("a", 0.5), told("b", 0.6)]) == []  # one seed, nothing to tell
    unknown = {"name": "log", "settings": [], "summary": {"evaluations": []}}
    assert len(seed_groups([unknown, unknown, *runs])) == 6


def test_runs_of_one_seed_are_not_independent() -> None:
    """The same run three times told as much as three seeds."""
    runs = [
        *(told(f"a{n}", 0.5 + n / 100, lr="1") for n in range(3)),
        told("a3", 0.7, lr="1", seed="1"),
        told("b", 0.9, lr="2", seed="1"),
        told("b2", 0.7, lr="2", seed="2"),
        told("c", 0.9, lr="3", seed="1"),
        told("c again", 0.7, lr="3", seed="1"),
    ]
    one, two, same = seed_groups(runs)
    assert (len(one.names), one.seeds, two.seeds, same.seeds) == (4, 2, 2, 1)
    assert one.mean == pytest.approx(0.605)  # of 0.51 and 0.7
    assert one.deviation == pytest.approx(0.19 / 2**0.5)
    assert two.error == pytest.approx(((0.19**2 + 0.2**2) / 4) ** 0.5)
    assert same.mean == pytest.approx(0.8) and same.deviation is None and same.error is None


def test_groups_are_shown(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    runs = [write_run(tmp_path / f"arm{seed}", steps=2) for seed in range(3)]
    for seed, run in enumerate(runs):
        (run / "config.yaml").write_text(f"{CONFIG}seed: {seed}\n")
    out = tmp_path / "compare.html"
    assert main(["compare", *map(str, runs), "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "the same settings, other" in text and "not over seeds" in text
    with opened(out.as_uri()) as (page, seen):
        overview = page.inner_text("#overview")
        assert "The same settings, other seeds" in overview and "arm0, arm1, arm2" in overview
        assert "not over seeds" in overview and seen.errors == []
