"""The content of a run's page, from one pass over its event log and from its other files."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from rollpacker.core.records import Entry, Session
from rollpacker.report.log import events_path
from rollpacker.report.metrics import METRICS_FILE, TIMING_NAMES, step_metrics
from rollpacker.report.page.columns import MetricColumns, MetricRows
from rollpacker.report.page.health import RECENT_STEPS, findings
from rollpacker.report.page.settings import read_settings
from rollpacker.report.page.time_line import TimeLine
from rollpacker.report.step_history import StepHistory
from rollpacker.report.summary import RunSummary, with_paths
from rollpacker.report.time_book import CAUSES


class RunBook:
    """Gathers the data of a run's page: `feed` takes the log's entries, live or from a file, and
    `plain` returns the page's data so far."""

    def __init__(self, run: str | Path) -> None:
        """`run`: the run's folder or its event log. Raises `ValueError` if there is no log."""
        self.events = events_path(run)
        self.folder = self.events.parent
        self.columns = MetricColumns()
        self.time_line = TimeLine()
        self.started_at = ""
        """Date and time at which the run's first process started. Empty: not in the log."""
        self.truncated = False
        """Whether the last line of the log is cut off."""
        self.summary = RunSummary()
        self._rows = MetricRows(self.folder / METRICS_FILE)

    def feed(self, entry: Entry) -> StepHistory | None:
        """Read a log entry. Returns the step that the entry commits, or None."""
        if isinstance(entry, Session) and not self.started_at:
            self.started_at = str(entry.started_at)
        done = self.summary.feed(entry)
        if done is None:
            return None
        step, summary = done
        self.columns.add(summary.step, step_metrics(summary))
        self.time_line.feed(step)
        return step

    @property
    def num_steps(self) -> int:
        return len(self.columns.steps)

    @property
    def num_evaluations(self) -> int:
        return len(self.summary.accounting.history.evaluations)

    def plain(self, summary: dict[str, Any] | None = None) -> dict[str, Any]:
        """The data of the page, for `pack`. `summary`: the result of `RunSummary.plain`; None: it
        is made here."""
        for row in self._rows.read():
            self.columns.complete(row["step"], row)
        summary = self.summary.plain() if summary is None else summary
        settings, text = read_settings(self.folder)
        metrics = self.columns.plain()
        history = self.summary.accounting.history
        return {
            "name": self.folder.resolve().name,
            "summary": with_paths(summary, self.folder),
            "started_at": self.started_at,
            "phase": history.phase,
            "last_step": history.last_step,
            "truncated": self.truncated,
            "quiet_s": self.quiet_s(),
            "health": [
                {"level": one.level, "text": one.text}
                for one in findings(summary, self._recent(metrics))
            ],
            "causes": CAUSES,
            "cause_metrics": {cause: f"timing_s/{name}" for cause, name in TIMING_NAMES.items()},
            "metrics": metrics,
            "evaluations": _evaluations(summary["evaluations"]),
            "time_line": self.time_line.plain(),
            "settings": [[one.key, one.value, one.default] for one in settings],
            "config": text,
        }

    def quiet_s(self) -> float | None:
        """Seconds since the log was last written to. None: the log is gone."""
        try:
            return max(0.0, time.time() - self.events.stat().st_mtime)
        except OSError:
            return None

    def _recent(self, metrics: dict[str, Any]) -> dict[str, float]:
        """Mean of each metric by name over about the last `RECENT_STEPS` steps. `metrics` is the
        result of `MetricColumns.plain`."""
        most = max(1, RECENT_STEPS // metrics["of"])
        found = {}
        for name, column in metrics["columns"].items():
            last = column["mean"][-most:]
            known = last[np.isfinite(last)]
            if len(known):
                found[name] = float(known.mean())
        return found


def _evaluations(rows: list[dict[str, Any]]) -> dict[str, Any]:
    columns = MetricColumns()
    for row in rows:
        columns.add(row["step"], {name: value for name, value in row.items() if name != "step"})
    return columns.plain()
