"""Shows a run in Weights & Biases: a row of metrics is a row of the history, over `step`."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from rollpacker.trackers.samples_table import SamplesTable
from rollpacker.trackers.sending import (
    CLOSE_S,
    OPEN_S,
    Opening,
    Status,
    Tracker,
    TrackerProblem,
    check_connection,
)

ROWS_PER_STEP = 4
"""Maximum number of rows that a step adds to W&B's history: evaluation, samples, the step itself,
and a picture. W&B numbers rows, but offline it does not know how many a resumed run has. Rows are
then numbered from this number times the number of steps on, so that no number comes twice."""


class WandbTracker(Tracker):
    name = "wandb"
    _first: int | None = None
    """Number for the next row of W&B's history, set when a run is resumed. None: W&B numbers it."""

    def check(self) -> str:
        import wandb

        self.library = wandb
        ambient = wandb.setup(wandb.Settings(silent=True)).settings
        mode = self.config.options.get("mode", ambient.mode)
        if mode in ("offline", "dryrun", "disabled"):
            return f"{mode}, in trackers/wandb of the run's folder"
        if not wandb.login(prompt=False, verify=False):
            raise TrackerProblem("no API key: run `wandb login` or set WANDB_MODE=offline")
        check_connection(ambient.base_url, "set WANDB_MODE=offline and `wandb sync` later")
        return str(ambient.base_url)

    def open(self, run: Opening) -> tuple[str, str]:
        # Quiet, and never longer than what the run's end waits for.
        ours = {"silent": True, "console": "off"}
        ours |= {"init_timeout": OPEN_S, "finish_timeout": CLOSE_S}
        self.shown = shown = self.library.init(
            **{"project": run.project, "name": run.run_name, "config": run.config},
            **{"dir": str(run.folder), "id": run.run_id or secrets.token_hex(4)},
            **{"resume": "allow", **self.config.options},
            settings=self.library.Settings(**{**ours, **self.config.options.get("settings", {})}),
        )
        if run.run_id is not None:
            self._first = max(shown.step, ROWS_PER_STEP * (run.last_step + 2))
        shown.define_metric("step")
        shown.define_metric("*", step_metric="step")
        where = shown.url or f"`wandb sync {shown.dir.removesuffix('/files')}` uploads it"
        return shown.id, where

    def send(self, step: int, row: Mapping[str, Any]) -> None:
        self.shown.log({"step": step, **row}, step=self._first, commit=True)
        self._first = None

    def send_samples(self, step: int, table: SamplesTable) -> None:
        mixed = {"allow_mixed_types": True}
        shown = self.library.Table(columns=[*table.columns], data=table.rows, **mixed)
        self.send(step, {"samples": shown})

    def finish(self, status: Status, step: int, summary: Mapping[str, Any]) -> None:
        self.shown.summary.update({f"summary/{key}": value for key, value in summary.items()})
        self.shown.finish(exit_code={"ok": 0, "interrupted": 130, "failed": 1}[status])
