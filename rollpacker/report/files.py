"""Writes the report files of a finished (or killed) run: summary.json, report.html, timeline.png
and trace.json."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollpacker.imports import missing
from rollpacker.report.log import EventLog, events_path
from rollpacker.report.page.document import PAGE_FILE, write_page
from rollpacker.report.page.run_book import RunBook
from rollpacker.report.page.sample_choice import read_samples
from rollpacker.report.spans import Excerpt
from rollpacker.report.step_history import StepHistory
from rollpacker.report.summary import SUMMARY_FILE, with_paths, write_summary
from rollpacker.report.timeline import NUM_STEPS, choose_steps, draw_steps
from rollpacker.report.trace import write_steps_trace

logger = logging.getLogger(__name__)


def write_reports(
    run: str | Path,
    *,
    out: str | Path | None = None,
    steps: range | None = None,
    trace_steps: int = 50,
    log: EventLog | None = None,
    tell: Callable[[str], None] = lambda stage: None,
) -> dict[str, Any]:
    """Write the four report files into `out` (None: the run's folder) and return the summary.

    `steps`: steps in the picture (None: a few around a long round). `trace_steps`: number of last
    steps in the trace. `tell` is called with each stage of the work. Nothing is written for a run
    without a finished step; without matplotlib the picture is left out, with a warning. Raises
    `ValueError` or `LogError` if the log cannot be read, and `OSError` if writing fails."""
    if trace_steps < 1:
        raise ValueError(f"a trace needs at least one step, not {trace_steps}")
    events = events_path(run)
    folder = events.parent if out is None else Path(out)
    keep, book = _Keep(trace_steps), RunBook(events)
    log = EventLog(events) if log is None else log
    tell("reading the event log")
    for entry in log:
        done = book.feed(entry)
        if done is not None:
            keep.feed(done)
    book.truncated = log.truncated
    summary = book.summary.plain()
    if summary["steps"]["total"] == 0:
        return with_paths(summary, events.parent)
    folder.mkdir(parents=True, exist_ok=True)
    tell("drawing timeline.png")
    lacking = missing("matplotlib", extra="report", what="drawing timeline.png")
    if lacking is not None:
        logger.warning("%s", lacking)
    elif steps is not None:
        draw_steps(choose_steps(events, steps), folder / "timeline.png")
    elif any(step.samples for step in keep.excerpt.steps):
        draw_steps(keep.excerpt.steps, folder / "timeline.png")
    tell("writing trace.json")
    write_steps_trace(keep.last, folder / "trace.json", num_steps=summary["steps"]["total"])
    tell("reading the samples")
    samples = read_samples(events.parent)
    tell(f"writing {PAGE_FILE}")
    write_page(folder / PAGE_FILE, book.plain(summary), samples)
    summary = with_paths(summary, events.parent)
    files = (("report", PAGE_FILE), ("timeline", "timeline.png"), ("trace", "trace.json"))
    for name, file in files:
        if (folder / file).exists():
            summary["paths"][name] = str(folder / file)
    write_summary(summary, folder / SUMMARY_FILE)
    return summary


class _Keep:
    """Keeps the steps that the trace shows (`last`) and that the picture shows (`excerpt`)."""

    def __init__(self, num_last: int) -> None:
        self.last: deque[StepHistory] = deque(maxlen=num_last)
        self.excerpt = Excerpt(NUM_STEPS)

    def feed(self, step: StepHistory) -> None:
        self.last.append(step)
        self.excerpt.feed(step)
