"""MLflow, through its client: nothing global is set, and no other run of the process is touched.

Without a tracking URI (`options.tracking_uri`, `MLFLOW_TRACKING_URI`) the run's folder has the
store."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from rollpacker.imports import missing
from rollpacker.trackers.samples_table import SamplesTable
from rollpacker.trackers.sending import (
    Opened,
    Opening,
    Row,
    Status,
    Tracker,
    check_connection,
)

MAX_PARAMS = 100
"""MLflow takes so many in one call."""
MAX_PARAM_CHARACTERS = 500
_STATUSES = {"ok": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
_NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")


class MlflowTracker(Tracker):
    name: ClassVar[str] = "mlflow"
    _client: Any = None
    _run_id = ""
    _in_files = False
    """Of the store, not of the artifacts."""

    def missing(self) -> str | None:
        return missing("mlflow", extra="mlflow", what="the tracker mlflow")

    def check(self) -> str:
        import mlflow  # noqa: F401

        uri = self._tracking_uri()
        if uri is None:
            return "in trackers/mlflow of the run's folder"
        check_connection(uri, "start it, or unset MLFLOW_TRACKING_URI to use the run's folder")
        return uri

    def open(self, run: Opening) -> Opened:
        from mlflow import MlflowClient

        options = dict(self.config.options)
        options.pop("tracking_uri", None)
        uri = self._tracking_uri() or _own_store(run.folder)
        self._client = client = MlflowClient(tracking_uri=uri)
        self._in_files = urlsplit(uri).scheme in ("", "file")
        held = None
        if run.run_id is not None:
            self._run_id = run.run_id
            client.update_run(run.run_id, status="RUNNING")
            newest = client.get_run(run.run_id).data._metric_objs  # the public ones have no step
            held = [(metric.step, metric.key) for metric in newest]
        else:
            experiment = client.get_experiment_by_name(run.project)
            experiment_id = (
                client.create_experiment(run.project)
                if experiment is None
                else experiment.experiment_id
            )
            made = client.create_run(experiment_id, **{"run_name": run.run_name, **options})
            self._run_id = made.info.run_id
            self._log_params(run.config)
        client.log_dict(self._run_id, dict(run.config), "config.yaml")
        return Opened(run_id=self._run_id, where=f"run {self._run_id} in {uri}", held=held)

    def known_as(self, name: str) -> str:
        return metric_name(name, in_files=self._in_files)

    def send(self, step: int, row: Row) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [
            Metric(self.known_as(name), float(value), now, step)
            for name, value in row.items()
            if not isinstance(value, str)
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    def send_samples(self, step: int, table: SamplesTable) -> None:
        """In the form of MLflow's `log_table`, which needs pandas."""
        file = f"samples/step_{step:06d}.json"
        values = {"columns": table.columns, "data": table.rows}
        self._client.log_text(self._run_id, json.dumps(values), file)
        run = self._client.get_run(self._run_id)
        known = json.loads(run.data.tags.get("mlflow.loggedArtifacts", "[]"))
        tables = [*known, {"path": file, "type": "table"}]
        self._client.set_tag(self._run_id, "mlflow.loggedArtifacts", json.dumps(tables))

    def send_picture(self, step: int, path: Path) -> None:
        self._client.log_artifact(self._run_id, str(path))

    def finish(self, status: Status, step: int, summary: Mapping[str, Any]) -> None:
        self._client.log_dict(self._run_id, dict(summary), "summary.json")
        self._client.set_tag(self._run_id, "ended", summary["ended"])
        self._client.set_terminated(self._run_id, _STATUSES[status])

    def _tracking_uri(self) -> str | None:
        uri = self.config.options.get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI")
        return str(uri) if uri else None

    def _log_params(self, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        params = [Param(name, text[:MAX_PARAM_CHARACTERS]) for name, text in _leaves(config)]
        for first in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self._run_id, params=params[first : first + MAX_PARAMS])


def metric_name(name: str, *, in_files: bool = False) -> str:
    """As MLflow allows it: `eval/pass@1` is `eval/pass_at_1` there. In a store of files a name's
    parts are folders, and no metric may be named as another one's folder: dots part them there."""
    name = _NOT_IN_NAMES.sub("_", name.replace("@", "_at_"))
    return name.replace("/", ".") if in_files else name


def _own_store(folder: Path) -> str:
    """A database where SQLAlchemy is installed, else files, which MLflow keeps for those who ask
    for them."""
    place = (folder / "mlflow").resolve()
    place.mkdir(exist_ok=True)
    if find_spec("sqlalchemy") is not None:
        return f"sqlite:///{place}/mlflow.db"
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    return place.as_uri()


def _leaves(values: Any, name: str = "") -> list[tuple[str, str]]:
    """`("a.b", "1")` for every single value of a config."""
    if isinstance(values, Mapping):
        items = [(str(key), value) for key, value in values.items()]
    elif isinstance(values, list):
        items = [(str(index), value) for index, value in enumerate(values)]
    else:
        return [(_NOT_IN_NAMES.sub("_", name), str(values))]
    prefix = f"{name}." if name else ""
    return [leaf for key, value in items for leaf in _leaves(value, prefix + key)]
