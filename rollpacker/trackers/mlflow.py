"""Shows a run in MLflow, through a client object: no global setting, and no other MLflow run of the
process, is touched. Without a tracking URI (`options.tracking_uri`, `MLFLOW_TRACKING_URI`) the data
are stored in the run's folder."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rollpacker.trackers.samples_table import SamplesTable
from rollpacker.trackers.sending import (
    Opening,
    Status,
    Tracker,
    check_connection,
    leaves,
)

MAX_PARAMS = 100
"""Maximum number of parameters that MLflow takes in one call."""
MAX_PARAM_CHARACTERS = 500
_STATUSES = {"ok": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
_NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")


class MlflowTracker(Tracker):
    name = "mlflow"
    shows_texts = False
    _run_id = ""
    _in_files = False
    """Whether MLflow keeps its data in a folder of files, not in a database or on a server."""

    def check(self) -> str:
        import mlflow

        self.library = mlflow
        if (uri := self._tracking_uri()) is None:
            return "in trackers/mlflow of the run's folder"
        check_connection(uri, "start it, or unset MLFLOW_TRACKING_URI to use the run's folder")
        return uri

    def open(self, run: Opening) -> tuple[str, str]:
        uri = self._tracking_uri() or _own_store(run.folder)
        self.shown = client = self.library.MlflowClient(tracking_uri=uri)
        self._in_files = urlsplit(uri).scheme in ("", "file")
        self._run_id = run.run_id or self._new_run(run)
        if run.run_id is not None:
            client.update_run(run.run_id, status="RUNNING")
        else:
            named = {_NOT_IN_NAMES.sub("_", n): str(one) for n, one in leaves(run.config, ".")}
            make = self.library.entities.Param
            params = [make(name, one[:MAX_PARAM_CHARACTERS]) for name, one in named.items()]
            for first in range(0, len(params), MAX_PARAMS):
                client.log_batch(self._run_id, params=params[first : first + MAX_PARAMS])
        client.log_dict(self._run_id, run.config, "config.yaml")
        return self._run_id, f"run {self._run_id} in {uri}"

    def _new_run(self, run: Opening) -> str:
        """Create the run in MLflow, and its experiment if there is none. Returns the run's id."""
        options = {n: one for n, one in self.config.options.items() if n != "tracking_uri"}
        known = self.shown.get_experiment_by_name(run.project)
        experiment = known.experiment_id if known else self.shown.create_experiment(run.project)
        made = self.shown.create_run(experiment, **{"run_name": run.run_name, **options})
        return str(made.info.run_id)

    def send(self, step: int, row: Mapping[str, Any]) -> None:
        now, in_files = int(time.time() * 1000), self._in_files
        named = [(metric_name(name, in_files=in_files), float(one)) for name, one in row.items()]
        metrics = [self.library.entities.Metric(name, value, now, step) for name, value in named]
        self.shown.log_batch(self._run_id, metrics=metrics)

    def send_samples(self, step: int, table: SamplesTable) -> None:
        """Send a step's samples as a table that MLflow's page shows. MLflow's `log_table` would do
        the same, but needs pandas."""
        file = f"samples/step_{step:06d}.json"
        values = {"columns": table.columns, "data": table.rows}
        self.shown.log_text(self._run_id, json.dumps(values), file)
        tags = self.shown.get_run(self._run_id).data.tags
        known = json.loads(tags.get("mlflow.loggedArtifacts", "[]"))
        tables = json.dumps([*known, {"path": file, "type": "table"}])
        self.shown.set_tag(self._run_id, "mlflow.loggedArtifacts", tables)

    def send_picture(self, step: int, path: Path) -> None:
        self.shown.log_artifact(self._run_id, str(path))

    def finish(self, status: Status, step: int, summary: Mapping[str, Any]) -> None:
        self.shown.log_dict(self._run_id, dict(summary), "summary.json")
        self.shown.set_tag(self._run_id, "ended", summary["ended"])
        self.shown.set_terminated(self._run_id, _STATUSES[status])

    def _tracking_uri(self) -> str | None:
        uri = self.config.options.get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI")
        return str(uri) if uri else None


def metric_name(name: str, *, in_files: bool = False) -> str:
    """Returns a metric's name as MLflow allows it: `eval/pass@1` becomes `eval/pass_at_1`.
    `in_files`: MLflow keeps its data in files, where a slash would make a folder, and no metric may
    have a folder's name; slashes then become dots."""
    name = _NOT_IN_NAMES.sub("_", name.replace("@", "_at_"))
    return name.replace("/", ".") if in_files else name


def _own_store(folder: Path) -> str:
    """Returns the address of a store in the run's folder: a database if SQLAlchemy is installed,
    else files, which MLflow writes only on request."""
    place = (folder / "mlflow").resolve()
    place.mkdir(exist_ok=True)
    if find_spec("sqlalchemy") is not None:
        return f"sqlite:///{place}/mlflow.db"
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    return place.as_uri()
