"""A trainer in stages, in the summary of its run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console

from rollpacker.core.events import Trained
from rollpacker.core.records import Entry, Record, decode, encode
from rollpacker.pipeline.stages.overseer import Overseer
from rollpacker.report.page.health import findings
from rollpacker.report.summary import summarize_entries
from rollpacker.report.summary_table import render
from rollpacker.trainer.trainer import PipelineConfig
from tests.report.fake_run import FakeRun
from tests.report.test_metrics import documented
from tests.trainer.pipeline.test_overseer import ranks_times


def with_pipeline(entries: list[Entry], of_step: Mapping[int, dict[str, float]]) -> Iterator[Entry]:
    """A log whose steps had these metrics besides."""
    for entry in entries:
        if isinstance(entry, Record) and isinstance(entry.event, Trained):
            line = json.loads(encode(entry))
            line["metrics"] |= {
                f"perf/pipeline/{name}": value for name, value in of_step[entry.event.step].items()
            }
            entry = decode(json.dumps(line))
        yield entry


def metrics_of(step: int) -> dict[str, float]:
    """Another split from step 3 on; link 0 slow from 5 on, known at the end of 6, well in 9; host
    links from 7 to 10."""
    slow = 6 <= step < 9
    relayout = {"relayout_s": 41.25} if step == 2 else {}
    return relayout | {
        "bubble_ratio": 0.2,
        "host_links": float(7 <= step < 11),
        "stage_0/layers": 12.0 if step >= 3 else 10.0,
        "stage_0/busy_ratio": 0.75 if step >= 3 else 0.1,
        "stage_0/busy_s": 6.0,
        "stage_0/live_tokens/max": 1000.0 + step,
        "stage_0/slow": 0.0,
        "stage_1/layers": 12.0 if step >= 3 else 14.0,
        "stage_1/busy_ratio": 0.5,
        "stage_1/busy_s": 4.0,
        "stage_1/live_tokens/max": 500.0,
        "stage_1/slow": float(step >= 11),
        "link_0/message_s": 0.050 if 5 <= step < 9 else 0.002,
        "link_0/slow": float(slow),
    }


def text(summary: Mapping[str, Any]) -> str:
    console = Console(width=80, force_terminal=False)
    with console.capture() as capture:
        console.print(render(summary))
    return capture.get()


def test_the_report_has_stages_links_and_why_they_were_switched() -> None:
    of_step = {step: metrics_of(step) for step in range(1, 13)}
    summary = summarize_entries(with_pipeline(FakeRun(1).run(12), of_step))
    pipeline = summary["pipeline"]
    assert [one["layers"] for one in pipeline["stages"]] == [12, 12]
    assert [one["busy_ratio"] for one in pipeline["stages"]] == [0.75, 0.5]  # of this split alone
    assert [one["waiting_s"] for one in pipeline["stages"]] == [2.0, 4.0]
    assert pipeline["stages"][0]["live_tokens"] == 1012
    assert [one["slow_since"] for one in pipeline["stages"]] == [None, 11]
    assert pipeline["links"] == [{"link": 0, "message_s": 0.002, "slow_since": None}]
    assert pipeline["events"] == [
        {"step": 3, "event": "layout", "layers": [12, 12], "seconds": 41.25},
        {"step": 6, "event": "slow", "link": 0, "message_s": 0.05, "usual_s": 0.002},
        {"step": 7, "event": "links", "links": "host", "slow_links": [0]},
        {"step": 9, "event": "well", "link": 0, "message_s": 0.002, "usual_s": 0.002},
        {"step": 11, "event": "links", "links": "direct", "slow_links": []},
        {"step": 11, "event": "slow", "stage": 1},
    ]
    told = [one.text for one in findings(summary, {}) if "slow" in one.text]
    assert told == ["Pipeline stage 1 is slow since step 11."]
    shown = text(summary)
    assert "stage 1 slow since step 11" in shown
    for line in (
        "before step 3: another layout, 12, 12 layers, which took 41.2 s",
        "step 6: link 0-1 was slow (50.0 ms a message, usually 2.0)",
        "before step 7: host links, since link 0-1 was slow",
        "before step 11: direct links, since all links had been well for a while",
        "step 11: stage 1 was slow",
    ):
        assert line in shown


def test_a_run_without_stages_is_reported_as_before() -> None:
    summary = summarize_entries(FakeRun(1).run(5))
    assert "pipeline" not in summary and "pipeline" not in text(summary)


def test_its_metrics_are_in_the_documentation() -> None:
    found = Overseer(PipelineConfig(stages=2), num_shards=1).observe(1, ranks_times(2))
    names = {re.sub(r"_[01]/", "_N/", name) for name in found}
    assert len(names) == 9 and names <= documented()
    assert {f"perf/pipeline/{name}" for name in metrics_of(1)} <= found.keys()
