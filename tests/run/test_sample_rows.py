"""What the rows of `samples/` and `evaluations/` hold, and that docs/run-folder.md says it."""

from __future__ import annotations

import datetime
import json
import re
from pathlib import Path
from typing import Any

import numpy
import pyarrow.parquet
import pytest
import torch
import yaml

import rollpacker
from benchmarks.resume import write_config, write_model
from rollpacker.report.metrics import read_metrics
from rollpacker.run.folder.sample_rows import MAX_VALUE_CHARS, row_text
from rollpacker.run.folder.samples import SampleWriter

DOCS = (Path(__file__).parents[2] / "docs" / "run-folder.md").read_text()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> rollpacker.Run:
    """A real one of a tiny model, on rows with a column of their own."""
    threads, folder = torch.get_num_threads(), tmp_path_factory.mktemp("run")
    write_model(folder / "model")
    config = write_config(folder, steps=2)
    rows = [{"prompt": f"{n}+{n % 7}=", "note": f"<b>{n}</b>"} for n in range(40)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "rows.jsonl").write_text("\n" + text)  # an empty line: the first row is line 2
    yield rollpacker.train(  # type: ignore[misc]
        config, ["data.eval_fraction=0.3", "eval.every_steps=2", "rollout.max_response_tokens=20"]
    )
    torch.set_num_threads(threads)


def table(path: Path) -> pyarrow.Table:
    return pyarrow.parquet.read_table(path)


def test_a_row_says_which_line_it_came_from_and_what_the_model_saw(
    run: rollpacker.Run,
) -> None:
    lines = (run.folder.parents[1] / "rows.jsonl").read_text().splitlines()
    for folder in ("samples", "evaluations"):
        rows = table(run.folder / folder).to_pylist()
        assert rows
        for row in rows:
            line = int(row["row_where"].rsplit(", line ", 1)[1])
            source = json.loads(lines[line - 1])
            assert row["prompt"] == source["prompt"]
            assert json.loads(row["row"])["note"] == source["note"]
            assert row["rendered_prompt"].replace(" ", "").endswith(source["prompt"])


def test_every_response_of_an_evaluation_is_kept_and_adds_up(run: rollpacker.Run) -> None:
    evaluated = {
        row["step"]: row
        for _, row in read_metrics(run.folder / "metrics.jsonl")
        if "eval/reward" in row
    }
    files = sorted((run.folder / "evaluations").iterdir())
    assert [path.name for path in files] == [f"step_{step:06d}.parquet" for step in evaluated]
    assert len(files) == 3
    for path in files:
        rows = table(path).to_pylist()
        metrics = evaluated[rows[0]["step"]]
        judged = [row["reward"] for row in rows if row["reward"] is not None]
        assert metrics["eval/reward"] == pytest.approx(sum(judged) / len(judged))
        assert metrics["eval/rewards/vowels/mean"] == metrics["eval/reward"]
        assert metrics["eval/no_verdict"] == len(rows) - len(judged)
        assert metrics["eval/samples"] == len(rows)
        lengths = [row["num_tokens"] for row in rows]
        assert metrics["eval/response_length"] == pytest.approx(sum(lengths) / len(lengths))
        for row in rows:
            assert (
                (row["reward"] is None) == (row["failure"] is not None) == (row["passed"] is None)
            )


def documented(heading: str) -> dict[str, str]:
    part = DOCS.split(f"## {heading}\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| `([^`]+)` \| (\w+) \|", part, re.MULTILINE))


def test_the_page_has_every_column_with_its_type(run: rollpacker.Run) -> None:
    of_samples = documented("Columns of `samples/*.parquet`")
    of_evaluations = documented("Columns of `evaluations/*.parquet`")
    assert of_samples.pop("extra/NAME") == "string"  # of a reward that gives some (test_logged)
    shared = set(of_samples) - {"round_kind", "trained", "advantage", "loss_weight"}
    expected = {
        "samples": of_samples,
        "evaluations": of_evaluations | {name: of_samples[name] for name in shared},
    }
    for folder, columns in expected.items():
        for path in (run.folder / folder).iterdir():
            schema = pyarrow.parquet.read_schema(path)
            found = {f.name.replace("/vowels", "/NAME"): str(f.type) for f in schema}
            assert found == columns


def test_the_page_has_every_file(run: rollpacker.Run) -> None:
    names = {path.name for path in run.folder.iterdir()}
    assert names <= {name for name in names if f"`{name}" in DOCS}


def test_the_advantage_of_a_response_whose_tokens_have_their_own_is_their_mean(
    tmp_path: Path,
) -> None:
    threads = torch.get_num_threads()
    write_model(tmp_path / "model")
    run = rollpacker.train(write_config(tmp_path, steps=1), ["algorithm.name=ppo"])
    torch.set_num_threads(threads)
    trained = [row for row in table(run.folder / "samples").to_pylist() if row["trained"]]
    assert len({row["advantage"] for row in trained}) > 1
    tokens = sum(row["num_tokens"] for row in trained)
    mean = sum(row["advantage"] * row["num_tokens"] for row in trained) / tokens
    (metrics,) = [row for _, row in read_metrics(run.folder / "metrics.jsonl") if row["step"] == 1]
    assert mean == pytest.approx(metrics["critic/advantages/mean"], abs=1e-6)


def test_without_samples_nothing_is_kept(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    write_model(tmp_path / "model")
    config = yaml.safe_load(write_config(tmp_path, steps=1).read_text())
    config |= {"save_samples": False}
    config["data"]["eval_fraction"] = 0.2
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    run = rollpacker.train(tmp_path / "run.yaml")
    torch.set_num_threads(threads)
    assert not {"samples", "evaluations"} & {path.name for path in run.folder.iterdir()}


CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (numpy.float32(0.5), 0.5),
        (numpy.arange(3), [0, 1, 2]),
        (float("nan"), pytest.approx(float("nan"), nan_ok=True)),
        (datetime.date(2026, 1, 2), "2026-01-02"),
        (b"\xff", "b'\\xff'"),
        ({1, 2}, ["1", "2"]),
        ({(1, 2): 3}, repr(repr({(1, 2): 3}))[1:-1]),
        (CIRCLE, "[[...]]"),
        ("</script>\x1b[31m\u2028", "</script>\x1b[31m\u2028"),
        ("\udc80", "\udc80"),
    ],
)
def test_odd_values_of_a_row_are_told_somehow(value: Any, told: Any) -> None:
    text = row_text({"odd": value, "plain": "é"})
    assert json.loads(text) == {"odd": told, "plain": "é"} or isinstance(json.loads(text), str)
    assert "é" in text


def test_a_long_value_is_cut_off_and_says_so() -> None:
    told = json.loads(row_text({"tests": ["x" * 100_000], "answer": "4"}))
    assert told["answer"] == "4"
    assert len(told["tests"]) < MAX_VALUE_CHARS + 40 and "(100004 characters)" in told["tests"]


def test_half_surrogates_and_columns_without_a_value_are_written(tmp_path: Path) -> None:
    writer = SampleWriter(tmp_path)
    writer.add([{"step": 1, "completion": "a\ud800b", "reward/x": None, "trained": True}])
    writer.write()
    writer.add([{"step": 2, "completion": None, "reward/x": 1.0, "trained": False}])
    writer.write()
    rows = table(tmp_path / "samples").to_pylist()  # both files, with one schema
    assert [row["completion"] for row in rows] == ["a\\ud800b", None]
    assert [row["reward/x"] for row in rows] == [None, 1.0]
