"""Weights & Biases. Every row is a row of its history, whose axis is the metric `step`."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from rollpacker.imports import missing
from rollpacker.trackers.offline_log import offline_records
from rollpacker.trackers.samples_table import SamplesTable
from rollpacker.trackers.sending import (
    CLOSE_S,
    OPEN_S,
    Opened,
    Opening,
    Row,
    Status,
    Tracker,
    TrackerProblem,
    check_connection,
)

ROWS_PER_STEP = 4
"""At most: evaluation, samples, the step itself, and a picture. In offline mode W&B does not know
how many rows the run has when it goes on, and would count from 0 again."""
_EXIT_CODES = {"ok": 0, "interrupted": 130, "failed": 1}


class WandbTracker(Tracker):
    name: ClassVar[str] = "wandb"
    _run: Any = None
    _first: int | None = None
    """The number of the next row of W&B's history; None: it counts."""

    def missing(self) -> str | None:
        return missing("wandb", extra="wandb", what="the tracker wandb")

    def check(self) -> str:
        import wandb

        ambient = wandb.setup(wandb.Settings(silent=True)).settings
        mode = self.config.options.get("mode", ambient.mode)
        if mode in ("offline", "dryrun", "disabled"):
            return f"{mode}, in trackers/wandb of the run's folder"
        if not wandb.login(prompt=False, verify=False):
            raise TrackerProblem("no API key: run `wandb login` or set WANDB_MODE=offline")
        check_connection(ambient.base_url, "set WANDB_MODE=offline and `wandb sync` later")
        return str(ambient.base_url)

    def open(self, run: Opening) -> Opened:
        import wandb

        arguments = {
            "project": run.project,
            "name": run.run_name,
            "config": dict(run.config),
            "dir": str(run.folder),
            "id": run.run_id or secrets.token_hex(4),
            "resume": "allow",
            **self.config.options,
            "settings": self._settings(),
        }
        self._run = opened = wandb.init(**arguments)
        if run.run_id is not None:
            self._first = max(opened.step, ROWS_PER_STEP * (run.last_step + 2))
        opened.define_metric("step")
        opened.define_metric("*", step_metric="step")
        where = opened.url or f"`wandb sync {opened.dir.removesuffix('/files')}` uploads it"
        held = None
        if run.run_id is not None and not opened.resumed:
            held = _offline_values(run)
        return Opened(run_id=opened.id, where=where, held=held)

    def send(self, step: int, row: Row) -> None:
        self._log(step, row)

    def send_samples(self, step: int, table: SamplesTable) -> None:
        import wandb

        shown = wandb.Table(columns=[*table.columns], data=table.rows, allow_mixed_types=True)
        self._log(step, {"samples": shown})

    def send_picture(self, step: int, path: Path) -> None:
        import wandb

        self._log(step, {path.stem: wandb.Image(str(path))})

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log({"step": step, **values}, step=self._first, commit=True)
        self._first = None

    def finish(self, status: Status, step: int, summary: Mapping[str, Any]) -> None:
        self._run.summary.update({f"summary/{key}": value for key, value in summary.items()})
        self._run.finish(exit_code=_EXIT_CODES[status])

    def _settings(self) -> Any:
        """Quiet, and never longer than what the run's end waits for."""
        import wandb

        ours = {"silent": True, "console": "off"}
        limits = {"init_timeout": OPEN_S, "finish_timeout": CLOSE_S}
        return wandb.Settings(**{**ours, **limits, **self.config.options.get("settings", {})})


def _offline_values(run: Opening) -> Iterator[tuple[int, str]]:
    """(step, name of a metric) in the files of earlier sessions."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    for path in run.folder.glob(f"wandb/*run-*-{run.run_id}/run-{run.run_id}.wandb"):
        for data in offline_records(path):
            record = Record()
            record.ParseFromString(data)
            items = record.history.item
            row = {item.key or "/".join(item.nested_key): item.value_json for item in items}
            if "step" in row:
                yield from ((int(row["step"]), name) for name in row)
