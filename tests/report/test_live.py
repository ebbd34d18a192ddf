"""The observer of a running run: a resumed one ends with the rows and queues of an uninterrupted
one."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from rollpacker.core.events import Committed
from rollpacker.core.records import Record, Session
from rollpacker.report.display import LineDisplay, LiveDisplay, learned
from rollpacker.report.live import LiveReport
from rollpacker.report.metrics import read_metrics
from tests.report.fake_run import FakeRun, write


def report(folder, **options):
    console = options.pop("console", None) or Console(file=io.StringIO(), width=100)
    return LiveReport(folder, total_steps=8, console=console, tensorboard=False, **options)


def rows(folder):
    return [
        {k: v for k, v in row.items() if not k.startswith(("timing_s/", "perf/"))}
        for _, row in read_metrics(folder / "metrics.jsonl")
    ]


def is_committed(entry, step):
    return (
        isinstance(entry, Record)
        and isinstance(entry.event, Committed)
        and entry.event.step == step
    )


@pytest.mark.parametrize("step", range(1, 9))
def test_resumed_equals_uninterrupted(tmp_path, step):
    entries = FakeRun(5).run(8)
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    for folder in (whole, torn):
        folder.mkdir()
    one = report(whole)
    for entry in entries:
        one.feed(entry)
    one.close()

    # The checkpoint of `step` vouches for the log up to its `Commit`; the run goes on with
    # `Committed`.
    cut = next(i for i, e in enumerate(entries) if is_committed(e, step))
    first = report(torn)
    for entry in entries[: cut + 40]:
        first.feed(entry)
    first.close()
    write(entries[:cut], torn / "events.jsonl")
    second = report(torn, resume=True)
    time_s = entries[cut - 1].time_s
    second.feed(Session(started_at="2026-01-02T00:00:00+00:00", time_s=time_s, step=step, job={}))
    for entry in entries[cut:]:
        second.feed(entry)
    second.close()

    assert sorted(rows(torn), key=str) == sorted(rows(whole), key=str)
    assert second.accounting.history.queue == one.accounting.history.queue
    assert second.accounting.time.wall_s == pytest.approx(one.accounting.time.wall_s, abs=1e-4)


@pytest.mark.parametrize("kept", [0, 3, 7])
def test_a_resume_makes_lost_rows_again(tmp_path, kept, caplog):
    entries = FakeRun(5).run(8)
    cut = next(i for i, e in enumerate(entries) if is_committed(e, 6))
    first = report(tmp_path)
    for entry in entries[:cut]:
        first.feed(entry)
    first.close()
    write(entries[:cut], tmp_path / "events.jsonl")
    metrics = tmp_path / "metrics.jsonl"
    whole = rows(tmp_path)
    assert len(whole) == 7  # five steps, two evaluations
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:kept]))
    if not kept:
        metrics.unlink()
    report(tmp_path, resume=True).close()
    assert rows(tmp_path) == whole
    assert ("made again from the event log" in caplog.text) == (kept < 7)


def test_without_a_terminal_there_is_one_plain_line_a_step(tmp_path):
    output = io.StringIO()
    live = report(tmp_path, console=Console(file=output, width=80))
    assert isinstance(live._display, LineDisplay)
    for entry in FakeRun(1).run(6):
        live.feed(entry)
    live.close()
    lines = output.getvalue().splitlines()
    assert [line.split(" | ")[1] for line in lines] == [
        "evaluation after step 0",
        "step 1/8",
        "step 2/8",
        "step 3/8",
        "step 4/8",
        "evaluation after step 5",
        "step 5/8",
        "step 6/8",
    ]
    assert "\x1b" not in output.getvalue()
    assert "deferred" in lines[1] and "reward" in lines[1] and "left" in lines[1]


def test_a_resume_shows_no_line_of_the_session_before(tmp_path):
    """Neither its evaluations nor the step of the checkpoint, which is settled by the resume."""
    entries = FakeRun(1).run(8)
    cut = next(i for i, e in enumerate(entries) if is_committed(e, 6))
    write(entries[:cut], tmp_path / "events.jsonl")
    output = io.StringIO()
    live = report(tmp_path, resume=True, console=Console(file=output, width=80))
    for entry in entries[cut:]:
        live.feed(entry)
    assert live._display._state.evaluation is not None
    live.close()
    lines = [line.split(" | ")[1] for line in output.getvalue().splitlines()]
    assert [line for line in lines if line.startswith("step")] == ["step 7/8", "step 8/8"]
    assert "evaluation after step 0" not in lines and "evaluation after step 5" not in lines


def test_steps_beyond_the_last_empty_the_queue(tmp_path):
    output = io.StringIO()
    live = report(tmp_path, console=Console(file=output, width=80))
    live._display._state.total_steps = 4
    for entry in FakeRun(1).run(6):
        live.feed(entry)
    live.close()
    assert "| step 4/4 |" in output.getvalue()
    assert "| step 4/4 + 1 |" in output.getvalue()


def test_an_evaluation_without_some_verdicts_is_marked(tmp_path):
    output = io.StringIO()
    live = report(tmp_path, console=Console(file=output, width=80))
    live._display.on_evaluation(0, {"eval/pass@1": 0.0, "eval/no_verdict": 28.0})
    live.close()
    assert "| eval/pass@1 0.000 (28 without a verdict) |" in output.getvalue()
    shown = learned(live._display._state)
    assert shown["pass@1"] == "0.000 (28 without a verdict) (step 0)"


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_live_panel_fits_its_terminal(tmp_path, width, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=24)
    live = report(tmp_path, console=console)
    assert isinstance(live._display, LiveDisplay)
    for entry in FakeRun(1).run(7):
        live.feed(entry)
    panel = live._display._panel()
    live.close()
    plain = Console(file=io.StringIO(), width=width)
    plain.print(panel)
    lines = plain.file.getvalue().splitlines()
    assert len(lines) == 4  # nothing wrapped
    assert lines[0].startswith("step 7/8")
    assert "reward" in lines[2]
    if width >= 80:
        assert "training" in lines[3] and "pass@1 0.250" in lines[2]


def test_a_dumb_terminal_gets_lines(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    live = report(tmp_path, console=Console(file=io.StringIO(), force_terminal=True))
    live.close()
    assert isinstance(live._display, LineDisplay)
