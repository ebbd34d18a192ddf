"""The observer of a running run, which keeps its accounting, its metrics files and its display up
to date. On a resume the existing log is read first, so that metrics and display go on as if the run
had not been interrupted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollpacker.callbacks import Metrics
from rollpacker.core.records import Entry, Note
from rollpacker.report.accounting import Accounting
from rollpacker.report.display import Display, make_display
from rollpacker.report.log import EVENTS_FILE, EventLog
from rollpacker.report.metrics import MetricsWriter, step_metrics

if TYPE_CHECKING:
    from rich.console import Console


RowWritten = Callable[[int, Metrics, bool], None]
"""Type of a function that is called after a row of metrics was written: with the step's number, the
metrics, and whether they are of the evaluation after the step."""


class LiveReport:
    """An `Observer` (core/records.py) that is fed the entries of a run's log as they are written.
    `feed` is O(1) but at a step's end.

    `resume`: the folder's event log, already cut back to the checkpoint, is read first, and later
    rows of `metrics.jsonl` are removed; else `metrics.jsonl` is appended to as it is.
    `total_steps`: number of steps that the progress bar counts to. `slots` and
    `max_response_tokens`: see `Accounting`. `notebook`: the run's name, for a display in a
    notebook's cell; None: in the terminal."""

    def __init__(
        self,
        folder: str | Path,
        *,
        total_steps: int | None,
        resume: bool = False,
        slots: int | None = None,
        max_response_tokens: int | None = None,
        console: Console | None = None,
        show: bool = True,
        notebook: str | None = None,
        tensorboard: bool = True,
    ) -> None:
        folder = Path(folder)
        self.accounting = Accounting(slots=slots, max_response_tokens=max_response_tokens)
        rows = self._read_log(folder / EVENTS_FILE) if resume else []
        history = self.accounting.history
        resume_step = history.last_step if resume else None
        self._metrics = MetricsWriter(
            folder, resume_step=resume_step, log_rows=rows, tensorboard=tensorboard
        )
        self.on_row: RowWritten | None = None
        """Function to call for every row of metrics that was written. None: no function."""
        self._display: Display | None = None
        if show and notebook is not None:
            from rollpacker.report.notebook import NotebookDisplay

            self._display = NotebookDisplay(self.accounting, total_steps=total_steps, name=notebook)
        elif show:
            assert console is not None, "a display has a console"
            self._display = make_display(self.accounting, total_steps=total_steps, console=console)
        if self._display is not None and history.evaluations:
            self._display.on_evaluation(*list(history.evaluations.items())[-1], is_new=False)
        self._shown_before = None if resume_step is None else resume_step + 1
        """The step after the last commit that a resume found in the log. This process runs the step
        again, but the one before may have shown it to the user. None: the run was not resumed."""

    def row_so_far(self, step: int) -> dict[str, Any]:
        """Metrics by name of the step that is being committed, as far as they are known."""
        return step_metrics(self.accounting.so_far(step))

    def _read_log(self, path: Path) -> list[dict[str, Any]]:
        """Read the existing event log into the accounting, and return its rows of metrics."""
        rows: list[dict[str, Any]] = []
        evaluations = self.accounting.history.evaluations
        for entry in EventLog(path):
            num_evaluations = len(evaluations)
            step = self.accounting.feed(entry)
            if step is not None:
                rows.append({"step": step.step, **step_metrics(step)})
            elif len(evaluations) > num_evaluations and isinstance(entry, Note):
                marks = dict.fromkeys(self.accounting.marks, 1)
                rows.append({"step": entry.step, **entry.metrics, **marks})
        return rows

    def feed(self, entry: Entry) -> None:
        step = self.accounting.feed(entry)
        if step is not None:
            self._write(step.step, step_metrics(step))
            if self._display is not None:
                self._display.on_step(step, is_new=step.step != self._shown_before)
        elif isinstance(entry, Note) and entry.name == "evaluation" and entry.metrics:
            marks = dict.fromkeys(self.accounting.marks, 1)
            self._write(entry.step, {**entry.metrics, **marks}, is_evaluation=True)
            if self._display is not None:
                self._display.on_evaluation(entry.step, entry.metrics)

    def _write(self, step: int, row: Mapping[str, Any], *, is_evaluation: bool = False) -> None:
        if not is_evaluation:
            self._metrics.write(step, row)
        elif not self._metrics.write_evaluation(step, row):
            return
        if self.on_row is not None:
            self.on_row(step, row, is_evaluation)

    def close(self) -> None:
        """Flush the files and release the terminal. Further calls do nothing."""
        if self._display is not None:
            self._display.close()
        self._metrics.close()
