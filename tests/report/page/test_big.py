"""A page of a long run holds a part of it, and says which."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollpacker.report import files
from rollpacker.report.files import write_reports
from rollpacker.report.history import iterate_steps
from rollpacker.report.log import EventLog
from rollpacker.report.page import document
from rollpacker.report.page.columns import MetricColumns, MetricRows, bucketed
from rollpacker.report.page.run_book import RunBook
from rollpacker.report.page.sample_choice import read_samples
from rollpacker.report.page.time_line import TimeLine
from tests.report.page.runs import write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("big") / "run", steps=60, p0=4, r0=4)


def test_buckets_keep_the_least_and_the_most() -> None:
    column = [float(n % 7) for n in range(10)] + [float("nan"), 100.0, float("nan")]
    found = bucketed(column, 4)
    assert found["min"].tolist() == [0, 0, 1, pytest.approx(float("nan"), nan_ok=True)]
    assert found["max"].tolist()[:3] == [3, 6, 100]
    assert found["mean"][0] == np.mean(column[:4])


def test_a_long_run_is_told_in_buckets_that_cover_every_step() -> None:
    columns = MetricColumns()
    for step in range(1, 2502):
        columns.add(step, {"x": step, "kind": "short", **({"late": 1.0} if step > 2000 else {})})
    columns.complete(7, {"logged": 3.5})
    plain = columns.plain()
    assert plain["of"] == 3 and plain["num_steps"] == 2501 and plain["step"][-1] == 2501
    x = plain["columns"]["x"]
    assert x["min"][0] == 1 and x["max"][-1] == 2501 and "kind" not in plain["columns"]
    assert np.nanmax(plain["columns"]["logged"]["max"]) == 3.5
    assert not np.isfinite(plain["columns"]["late"]["mean"][0])


def test_texts_keep_within_their_budget_and_the_telling_ones_stay(run: Path) -> None:
    everything = read_samples(run)
    some = read_samples(run, max_bytes=60_000)
    assert some["num"] == everything["num"] == everything["num_texts"] == some["num_listed"]
    assert 100 < some["num_texts"] < everything["num"]
    assert sum(len(text.encode()) for text in some["table"]) < 90_000
    with_text = some["text"] >= 0
    for end in (some["step"].min(), some["step"].max()):
        assert with_text[some["step"] == end].any()
    assert with_text[np.nanargmax(some["tokens"])]
    assert with_text[np.nanargmax(some["check_s"])]


def test_more_rows_than_can_be_listed_are_chosen_by_hash(run: Path) -> None:
    some = read_samples(run, max_rows=200)
    assert some["num_listed"] == len(some["step"]) == 200 < some["num"]
    assert (np.diff(some["step"]) >= 0).all()


def test_a_timeline_has_the_first_and_the_last_steps_and_every_round(run: Path) -> None:
    whole, part = TimeLine(), TimeLine(max_bars=200)
    for steps in (whole, part):
        for step in iterate_steps(EventLog(run / "events.jsonl")):
            steps.feed(step)
    full, cut = whole.plain(), part.plain()
    assert full["num_detailed"] == len(full["step"]) == 60
    assert 3 <= cut["num_detailed"] < 60 and len(cut["rounds"]["kind"]) == len(
        full["rounds"]["kind"]
    )
    bars = np.diff(cut["bars"]["first"])
    assert bars[0] > 0 and bars[-1] > 0


def test_values_that_only_metrics_jsonl_has_are_drawn(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "mine": 2.5}\n{"step": 2, "eval/x": 1}\nno row\n{"step": 3, "m')
    rows = MetricRows(path)
    assert rows.read() == [{"step": 1, "mine": 2.5}]
    with path.open("a") as file:
        file.write('ine": 4}\n')
    assert rows.read() == [{"step": 3, "mine": 4}]
    (run / "metrics.jsonl").write_text('{"step": 2, "mine": 2.5}\n')
    book = RunBook(run)
    for entry in EventLog(run / "events.jsonl"):
        book.feed(entry)
    column = book.plain()["metrics"]["columns"]["mine"]["mean"]
    assert column[1] == 2.5 and np.isnan(column[0])


def test_a_truncated_log_and_a_broken_sample_file_still_make_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []

    def write_page(path: Path, run: Mapping[str, Any], samples: Mapping[str, Any]) -> None:
        told.append(run["truncated"])
        document.write_page(path, run, samples)

    monkeypatch.setattr(files, "write_page", write_page)
    run = write_run(tmp_path / "run", steps=12)
    text = (run / "events.jsonl").read_text()
    (run / "events.jsonl").write_text(text[: int(len(text) * 0.8)])
    broken = next((run / "samples").iterdir())
    broken.write_bytes(broken.read_bytes()[:100])
    (run / "config.yaml").write_text("{{ no yaml")
    summary = write_reports(run)
    assert summary["steps"]["total"] < 12 and (run / "report.html").is_file()
    assert told == [True]
