"""`rollpacker.Run`: reads a run's folder for a program, when the run is over or while it trains."""

from __future__ import annotations

import html
from collections.abc import Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollpacker.report.rows import Table

METRICS_TO_SEE = (
    *("step", "round/kind", "critic/rewards/mean", "response_length/mean", "actor/loss"),
    *("actor/grad_norm", "timing_s/step"),
)
SAMPLES_TO_SEE = ("step", "prompt", "completion", "reward", "advantage", "num_tokens")
EVALUATION_SAMPLES_TO_SEE = ("step", "prompt", "completion", "reward", "num_tokens")
MOST_NAMED = 5
"""Number of steps that a message lists at most."""


class Run:
    """A run's folder, whose files are read when asked for. `rollpacker.train` returns a `Run`;
    `Run(folder)` is an existing run, also while it trains. Raises `ValueError` if the folder holds
    no run."""

    def __init__(
        self,
        folder: str | PathLike[str],
        *,
        reason: str | None = None,
        summary: dict[str, Any] | None = None,
    ) -> None:
        """`reason` (why the run ended) and `summary` are read from the folder if they are None."""
        self.folder = Path(folder)
        if not (self.folder / "config.yaml").is_file():
            raise ValueError(f"there is no run in {self.folder}: it has no config.yaml")
        if summary is not None:
            self.summary = summary
        self._reason = reason

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def reason(self) -> str | None:
        """Why the run ended: "every step is done", "the data ended", "interrupted", what a callback
        said, or the error. None if the run is at work, or was killed."""
        if self._reason is not None:
            return self._reason
        found: str | None = self.summary["finished"] or self.summary.get("failed")
        return found

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The contents of `summary.json`, whose keys are in docs/metrics.md."""
        from rollpacker.report.summary import summarize

        return summarize(self.folder)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The contents of `config.yaml`, with every default."""
        from rollpacker.config.document import parse_document, read_text

        path = self.folder / "config.yaml"
        return parse_document(read_text(path), str(path))[0]

    @property
    def model(self) -> Path:
        """The trained model, a Hugging Face folder. Raises `CheckpointError` if none is saved."""
        from rollpacker.run.folder.checkpoint import newest_checkpoint

        return newest_checkpoint(self.folder / "checkpoints").folder / "model"

    @property
    def metrics(self) -> Table:
        """A table with a row for each step so far. The columns are in docs/metrics.md."""
        return self._rows(evaluations=False)

    @property
    def evaluations(self) -> Table:
        """A table with a row for each evaluation so far."""
        return self._rows(evaluations=True)

    def _rows(self, *, evaluations: bool) -> Table:
        from rollpacker.report.metrics import METRICS_FILE, is_evaluation, read_metrics
        from rollpacker.report.rows import Table

        path = self.folder / METRICS_FILE
        rows = [row for _, row in read_metrics(path)] if path.exists() else []
        chosen = [row for row in rows if is_evaluation(row) == evaluations]
        if evaluations:
            return Table(chosen, name="evaluations", of_metrics=True)
        return Table(chosen, name="steps", first=METRICS_TO_SEE, of_metrics=True)

    def samples(self, step: int | None = None, *, untrained: bool = False) -> Table:
        """Returns a table of the samples trained on, of all steps or of `step`; with `untrained`
        also of those kept only because their check was slow. It is empty with `save_samples:
        false`, and grows with each checkpoint. Raises `ValueError` if other steps have samples and
        this one has none."""
        from rollpacker.report.rows import Table

        rows = self._parquet("samples/steps_*.parquet", step)
        chosen = [row for row in rows if untrained or row.get("trained", True)]
        return Table(chosen, name="samples", first=SAMPLES_TO_SEE)

    def evaluation_samples(self, step: int | None = None) -> Table:
        """Returns a table of the samples that evaluations generated: of all evaluations, or of that
        after `step` (0: before the first step). It is empty with `save_samples: false`. Raises
        `ValueError` if other evaluations have samples and this one has none."""
        from rollpacker.report.rows import Table

        rows = self._parquet("evaluations/step_*.parquet", step)
        return Table(rows, name="samples", first=EVALUATION_SAMPLES_TO_SEE)

    def _parquet(self, files: str, step: int | None) -> list[dict[str, Any]]:
        import pyarrow.parquet

        paths = sorted(self.folder.glob(files))
        chosen = None if step is None else [("step", "=", step)]
        rows: list[dict[str, Any]] = []
        for path in paths:
            rows += pyarrow.parquet.read_table(path, filters=chosen).to_pylist()
        if paths and not rows and step is not None:
            raise ValueError(f"{paths[0].parent} has no step {step}: it has {_steps_of(paths)}")
        return rows

    def __repr__(self) -> str:
        steps = self.summary["steps"]["total"]
        passed = _passed(self.summary)
        told = [f"{steps} steps", self.reason or "not finished", *([passed] if passed else [])]
        return f"Run({str(self.folder)!r}: {', '.join(told)})"

    def _repr_html_(self) -> str:
        summary = self.summary
        told = {
            "run": str(self.folder),
            "ended": self.reason or "not finished",
            "steps": str(summary["steps"]["total"]),
            "seconds": f"{summary['wall_s']:.1f}",
            "held out": _passed(summary) or "not evaluated",
        }
        cells = "".join(
            f"<tr><th>{name}</th><td>{html.escape(value)}</td></tr>" for name, value in told.items()
        )
        return f"<table>{cells}</table>"


def _steps_of(paths: Sequence[Path]) -> str:
    import pyarrow.parquet

    found: set[int] = set()
    for path in paths:
        found.update(pyarrow.parquet.read_table(path, columns=["step"])["step"].to_pylist())
    steps = sorted(found)
    if len(steps) > MOST_NAMED and steps == [*range(steps[0], steps[-1] + 1)]:
        return f"{steps[0]} to {steps[-1]}"
    named = steps if len(steps) <= MOST_NAMED else [*steps[:MOST_NAMED], "...", steps[-1]]
    return ", ".join(map(str, named))


def _passed(summary: dict[str, Any]) -> str | None:
    """Returns pass@1 of the first and last evaluation, as a text. None without an evaluation."""
    found = [one for one in summary["evaluations"] if "eval/pass@1" in one]
    told = [f"{one['eval/pass@1']:.3f} (step {one['step']})" for one in found]
    return f"pass@1 {' -> '.join(told[:1] + told[1:][-1:])}" if told else None
