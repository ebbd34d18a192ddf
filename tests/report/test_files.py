"""Trace, pictures and summary of a synthetic run, and logs that are broken in known ways."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from rich.console import Console

from rollpacker.cli.main import main
from rollpacker.core.commands import Commit
from rollpacker.core.events import Committed, WeightsSynced
from rollpacker.core.records import LogError, Note, Record, Session, encode
from rollpacker.report.accounting import Accounting
from rollpacker.report.files import write_reports
from rollpacker.report.history import iterate_steps
from rollpacker.report.log import EventLog, events_path
from rollpacker.report.spans import read_steps
from rollpacker.report.step_history import Outcome
from rollpacker.report.summary import summarize, summarize_entries
from rollpacker.report.summary_table import render
from rollpacker.report.time_book import CAUSES, RARE_CAUSES
from rollpacker.report.timeline import choose_steps, draw_comparison, draw_steps
from rollpacker.report.trace import write_steps_trace
from tests.report.fake_run import FakeRun, write

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    write(FakeRun(1).run(12), folder / "events.jsonl")
    return folder


def test_spans_tell_what_became_of_every_sample(run):
    steps = read_steps(EventLog(run / "events.jsonl"))
    first = steps[0]
    outcomes = [span.outcome for span in first.samples.values()]
    assert outcomes.count(Outcome.TRAINED) == 64
    assert outcomes.count(Outcome.DEFERRED) == 20  # two prompts of ten samples
    assert len(outcomes) == 100
    assert all(span.end_s is not None for span in first.samples.values())
    assert {phase.name for phase in first.phases} >= {"training", "sync", "checkpoint"}
    assert first.rollout_start_s < first.rollout_end_s < first.end_s
    for step, following in pairwise(steps):
        assert step.end_s <= following.rollout_start_s


def test_the_trace_is_what_viewers_expect(run):
    steps = list(iterate_steps(EventLog(run / "events.jsonl")))
    write_steps_trace(steps[-4:], run / "trace.json", num_steps=len(steps))
    trace = json.loads((run / "trace.json").read_text())
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    rounds = [e for e in events if e["ph"] == "X" and e["pid"] == 1 and e["tid"] == 1]
    assert [event["args"]["step"] for event in rounds] == [9, 10, 11, 12]
    samples = [e for e in events if e["ph"] == "X" and e["pid"] == 2]
    assert len(samples) == sum(event["args"]["samples"] for event in rounds)
    lanes: dict[int, int] = {}
    for event in sorted(samples, key=lambda e: e["ts"]):
        assert event["ts"] >= lanes.get(event["tid"], 0), "two samples at once in one lane"
        lanes[event["tid"]] = event["ts"] + event["dur"]
    counts = [e["args"]["samples"] for e in events if e["ph"] == "C"]
    assert min(counts) == 0 and max(counts) == 100 and counts[-1] == 0


def test_a_trace_says_which_steps_it_holds(run, capsys):
    trace = run / "trace.json"

    def told() -> tuple[str, str]:
        found = json.loads(trace.read_text())
        (name,) = (
            e["args"]["name"]
            for e in found["traceEvents"]
            if e["name"] == "process_name" and e["pid"] == 1
        )
        return name, found["otherData"]["steps"]

    assert main(["report", str(run), "--trace-steps", "4"]) == 0
    held = "steps 9 to 12, the last 4 of 12"
    assert told() == (f"run ({held})", held)
    assert "trace.json holds the last 4 of 12 steps" in capsys.readouterr().out
    assert main(["report", str(run)]) == 0
    assert told() == ("run (all 12 steps)", "all 12 steps")
    assert "trace.json holds" not in capsys.readouterr().out


def test_spans_and_the_time_book_tell_the_same_seconds(run):
    """The controller's seconds for an event lie within the spans: here 50 microseconds each."""
    steps = list(iterate_steps(EventLog(run / "events.jsonl")))
    write_steps_trace(steps, run / "trace.json", num_steps=len(steps))
    spans = json.loads((run / "trace.json").read_text())["traceEvents"]
    accounting = Accounting()
    booked = [done for entry in EventLog(run / "events.jsonl") if (done := accounting.feed(entry))]
    assert len(booked) == 12
    for step in booked:
        for cause in ("reward_wait", "training", "sync", "checkpoint", "evaluation"):
            seconds = sum(
                e["dur"] / 1e6
                for e in spans
                if e["ph"] == "X"
                and e["pid"] == 1
                and (e["name"], e["args"]["step"]) == (cause.replace("_", " "), step.step)
            )
            assert seconds == pytest.approx(step.seconds[cause], abs=3e-4), (step.step, cause)


def test_a_phase_ends_where_a_notes_span_begins():
    start = Session(started_at="", time_s=0.0, step=0, job={})
    metrics = {"eval/pass@1": 0.5, "timing_s/callbacks": 0.5}
    entries = [
        start,
        Record(
            time_s=1.0,
            event=WeightsSynced(time_s=1.0, version=1),
            commands=(Commit(step=1, last=False),),
            cost_s=0.0,
        ),
        Note(time_s=4.0, name="evaluation", seconds=2.0, step=1, metrics=metrics),
        Record(
            time_s=5.0,
            event=Committed(time_s=5.0, step=1, checkpointed=True),
            commands=(),
            cost_s=0.0,
        ),
    ]
    (step,) = read_steps(entries)
    assert [(p.name, p.start_s, p.end_s) for p in step.phases] == [
        ("checkpoint", 1.0, 2.0),
        ("evaluation", 2.0, 3.5),
        ("callbacks", 3.5, 4.0),
        ("checkpoint", 4.0, 5.0),
    ]


def test_a_trace_needs_a_step(run):
    with pytest.raises(ValueError, match="at least one step"):
        write_reports(run, trace_steps=0)


def test_pictures_are_drawn(run, tmp_path):
    steps = choose_steps(run / "events.jsonl", range(2, 4))
    assert draw_steps(steps, tmp_path / "a.png") == [2, 3]
    without = write(FakeRun(1, tail_batching=False).run(12), tmp_path / "without.jsonl")
    draw_comparison(run / "events.jsonl", without, tmp_path / "b.png")
    for name in ("a.png", "b.png"):
        assert (tmp_path / name).read_bytes().startswith(PNG)


def test_in_a_narrow_picture_every_step_keeps_its_number(run):
    from rollpacker.report.timeline import _Clock, _figure, _label_steps

    steps = choose_steps(run / "events.jsonl", range(1, 13))
    _, (axes, _) = _figure(1, heights=[2.0, 0.3])
    _label_steps(axes, steps, _Clock(steps), 10)
    assert [int(text.get_text().split()[0]) for text in axes.texts] == list(range(1, 13))


def test_steps_that_are_not_there_are_named(run):
    with pytest.raises(ValueError, match="no finished steps 50 to 51"):
        choose_steps(run / "events.jsonl", range(50, 52))


def test_the_summary_adds_up(run):
    summary = summarize(run)
    assert summary["steps"]["total"] == 12
    assert summary["finished"] == "done"
    kinds = summary["steps"]["by_kind"]
    assert kinds["short"]["steps"] + kinds["long"]["steps"] == 12
    assert kinds["long"]["mean_step_s"] > kinds["short"]["mean_step_s"]
    assert set(summary["seconds"]) == set(CAUSES) - set(RARE_CAUSES)
    assert sum(summary["seconds"].values()) == pytest.approx(summary["wall_s"], abs=1e-6)
    assert [e["step"] for e in summary["evaluations"]] == [0, 5, 10]
    assert summary["prompts"]["trained"] == 12 * 8 - 3
    assert summary["prompts"]["dropped"] == {"fewer than two verdicts": 3}
    assert -0.5 < summary["lengths"]["shift"] < -0.1


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_and_says_it_all(run, width):
    console = Console(width=width, record=True)
    console.print(render(write_reports(run)))
    text = console.export_text()
    for words in ("held-out pass@1", "+0.100", "tail idle", "sum (wall time", "length shift"):
        assert words in text
    assert "short" in text and "long" in text and "timeline" in text
    table = text[: text.index("timeline")]
    assert max(map(len, table.splitlines())) <= width


def test_the_slowest_checks_stand_on_one_line_each_below_the_table(run):
    slowest = [{"sample": "long-task-name/0/1234#1.12", "seconds": 12.5}]
    kind = {
        "checks": 10,
        "mean_s": 1.0,
        "longest_s": 12.5,
        "mean_queue_s": 0.1,
        "deadline_s": None,
        "timed_out": 0,
        "retries": 0,
        "failed": {},
        "slowest": slowest,
    }
    console = Console(width=80, record=True)
    console.print(render({**write_reports(run), "checks": {"one": kind, "other": kind}}))
    assert "slowest    12.500 s  long-task-name/0/1234#1.12" in console.export_text()


def test_reports_land_in_the_folder(run):
    summary = write_reports(run)
    assert json.loads((run / "summary.json").read_text()) == json.loads(json.dumps(summary))
    assert sorted(p.name for p in run.iterdir()) == [
        "events.jsonl",
        "report.html",
        "summary.json",
        "timeline.png",
        "trace.json",
    ]


def test_nothing_is_written_for_a_run_without_a_step(tmp_path):
    write(FakeRun(1).run(1)[:20], tmp_path / "events.jsonl")
    assert write_reports(tmp_path)["steps"]["total"] == 0
    assert [p.name for p in tmp_path.iterdir()] == ["events.jsonl"]


@pytest.mark.parametrize("keep", [1, 7, 30])
def test_a_last_line_that_is_cut_off_is_left_out_and_told(run, keep):
    path = run / "events.jsonl"
    entries = list(EventLog(path))
    cut = encode(entries[-2])[:keep]
    path.write_text("".join(encode(e) + "\n" for e in entries[:-2]) + cut)
    log = EventLog(path)
    assert list(log) == entries[:-2]
    assert log.truncated
    summary = summarize_entries(log)
    assert sum(summary["seconds"].values()) == pytest.approx(summary["wall_s"], abs=1e-6)


def test_a_line_that_is_no_entry_is_an_error_with_its_number(run):
    path = run / "events.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], '{"loss": 0.5}', *lines[3:]]) + "\n")
    with pytest.raises(LogError, match=r"events.jsonl, line 4: not a line of an event log"):
        summarize(run)


@pytest.mark.parametrize("name", ["nothing", "empty"])
def test_a_folder_without_a_log_is_a_clear_error(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="give the folder of a run"):
        events_path(tmp_path / name)
