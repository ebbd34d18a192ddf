"""Metric names, the rows on disk, and what a resume does to them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rollpacker.report.accounting import Accounting
from rollpacker.report.metrics import MetricsWriter, read_metrics, step_metrics
from tests.report.fake_run import FakeRun


def summaries(seed=0, steps=8):
    accounting = Accounting()
    return [s for s in map(accounting.feed, FakeRun(seed).run(steps)) if s is not None]


def rows(folder: Path) -> list[dict]:
    return [row for _, row in read_metrics(folder / "metrics.jsonl")]


def untimed(metrics: dict) -> dict:
    return {k: v for k, v in metrics.items() if not k.startswith(("timing_s/", "perf/"))}


def test_all_but_timing_is_the_same_for_a_seed_on_a_slower_machine():
    slow = FakeRun(0)
    slow.cost_s = 0.001
    accounting = Accounting()
    slower = [s for s in map(accounting.feed, slow.run(8)) if s is not None]
    for one, other in zip(summaries(), slower, strict=True):
        metrics, others = step_metrics(one), step_metrics(other)
        assert untimed(metrics) == untimed(others)
        assert metrics != others


def documented() -> set[str]:
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    found = set()
    for line in text.splitlines():
        if not line.startswith("| `"):
            continue
        names = re.findall(r"`([^`]+)`", line.split("|")[1])
        first = names[0]
        found.add(first)
        for more in names[1:]:  # `/max` and `_trained` stand for the first name with another ending
            stem = first.rsplit(more[0], 1)[0] if more[0] in "/_" else ""
            found.add(stem + more)
    return found


def test_every_metric_is_in_the_documentation():
    names = documented()
    prefixes = (
        *("actor/", "response_length_all/", "round/dropped/", "round/no_verdict/", "rewards/"),
        *("perf/checks/", "carry/mismatch_per_token/age_"),
    )
    for summary in summaries():
        for name in step_metrics(summary):
            assert name in names or name.startswith(prefixes), name


def test_lengths_and_counts_have_their_field_names():
    metrics = step_metrics(summaries()[0])
    assert metrics["round/kind"] == "short"
    assert metrics["round/samples_launched"] == 100
    assert metrics["round/samples_trained"] == 64
    assert metrics["tokens/generated"] > metrics["tokens/trained"] > 0
    assert metrics["timing_s/gen"] == pytest.approx(
        metrics["timing_s/decode"] + metrics["timing_s/tail_idle"]
    )
    assert metrics["rewards/exact/mean"] == metrics["critic/rewards/mean"]
    assert metrics["actor/grad_norm"] == 0.5


def test_a_resume_cuts_rows_of_later_steps_and_a_broken_last_one(tmp_path):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write_evaluation(0, {"eval/pass@1": 0.25})
    for step in range(1, 5):
        writer.write(step, {"a": float(step)})
    writer.write_evaluation(4, {"eval/pass@1": 0.5})
    writer.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "a"')
    writer = MetricsWriter(tmp_path, resume_step=2, tensorboard=False)
    writer.write_evaluation(0, {"eval/pass@1": 0.75})
    writer.write(3, {"a": float("nan")})
    writer.close()
    assert rows(tmp_path) == [
        {"step": 0, "eval/pass@1": 0.25},
        {"step": 1, "a": 1.0},
        {"step": 2, "a": 2.0},
        {"step": 3, "a": None},
    ]


def test_a_foreign_file_is_named_with_its_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nhello\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2"):
        MetricsWriter(tmp_path, resume_step=1, tensorboard=False)


def test_a_file_that_is_not_utf8_is_named_with_its_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"step": "\xff"}\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2: not a row .* --resume"):
        MetricsWriter(tmp_path, resume_step=1, tensorboard=False)
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"step": "\xff')
    assert rows(tmp_path) == [{"step": 1}]  # a crash cut the last row off


def test_only_newlines_end_a_row(tmp_path):
    text = "one\u2028two\u0085three\x0bfour"
    (tmp_path / "metrics.jsonl").write_text(
        json.dumps({"step": 1, "round/kind": text}, ensure_ascii=False) + "\n"
    )
    assert rows(tmp_path) == [{"step": 1, "round/kind": text}]


def test_rows_that_the_file_lacks_come_from_the_log_and_that_is_said(tmp_path, caplog):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    for step in (1, 3):
        writer.write(step, {"a": step})
    writer.close()
    log_rows = [
        {"step": 0, "eval/reward": 0.5},
        *({"step": step, "a": 10 * step} for step in (1, 2, 3)),
        {"step": 4, "eval/reward": 0.75},  # of the step whose commit is repeated
    ]
    MetricsWriter(tmp_path, resume_step=3, log_rows=log_rows, tensorboard=False).close()
    assert rows(tmp_path) == [
        {"step": 0, "eval/reward": 0.5},
        {"step": 1, "a": 1},
        {"step": 2, "a": 20},
        {"step": 3, "a": 3},
        {"step": 4, "eval/reward": 0.75},
    ]
    assert [record.message.split("metrics.jsonl ")[1] for record in caplog.records] == [
        "lacked 2 of its rows (steps 0 to 2): made again from the event log"
    ]


def test_tensorboard_reads_back_what_was_written(tmp_path):
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    writer = MetricsWriter(tmp_path)
    writer.write(1, {"critic/rewards/mean": 0.5, "round/kind": "short"})
    writer.close()
    (path,) = (tmp_path / "tensorboard").iterdir()
    values = {
        value.tag: (event.step, value.tensor.float_val[0])
        for event in EventFileLoader(str(path)).Load()
        for value in event.summary.value
    }
    assert values == {"critic/rewards/mean": (1, 0.5)}
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["round/kind"] == "short"
