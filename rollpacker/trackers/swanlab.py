"""SwanLab: online with an account, or offline (`options.mode`, `SWANLAB_MODE`) in the run's
folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from rollpacker.imports import missing
from rollpacker.trackers.offline_log import offline_records
from rollpacker.trackers.samples_table import SamplesTable
from rollpacker.trackers.sending import (
    Opened,
    Opening,
    Row,
    Status,
    Tracker,
    TrackerProblem,
    check_connection,
)

_STATES = {"ok": "success", "interrupted": "aborted", "failed": "crashed"}


class SwanlabTracker(Tracker):
    name: ClassVar[str] = "swanlab"
    _run: Any = None

    def missing(self) -> str | None:
        return missing("swanlab", extra="swanlab", what="the tracker swanlab")

    def check(self) -> str:
        settings = self._settings()
        if settings.mode != "online":
            return f"{settings.mode}, in trackers/swanlab of the run's folder"
        if settings.api_key is None:
            raise TrackerProblem("no API key: run `swanlab login` or set SWANLAB_MODE=offline")
        check_connection(settings.api_host, "set SWANLAB_MODE=offline and `swanlab sync` later")
        return str(settings.web_host)

    def open(self, run: Opening) -> Opened:
        import swanlab

        settings = self._settings()
        arguments = {
            "project": run.project,
            "name": run.run_name,
            "config": dict(run.config),
            "log_dir": str(run.folder / "swanlab"),
            **self.config.options,
            "settings": settings,
        }
        if run.run_id is not None:
            arguments |= {"id": run.run_id, "resume": "allow"}
        self._run = opened = swanlab.init(**arguments)
        held = None
        if run.run_id is not None and opened.mode != "online":
            held = _offline_values(run)
        where = f"`swanlab sync {opened.dir}` uploads it"
        return Opened(
            run_id=opened.id,
            where=str(opened.url) if opened.mode == "online" else where,
            held=held,
        )

    def send(self, step: int, row: Row) -> None:
        self._run.log(
            {name: value for name, value in row.items() if not isinstance(value, str)}, step=step
        )

    def send_samples(self, step: int, table: SamplesTable) -> None:
        import swanlab

        shown = swanlab.echarts.Table().add(table.columns, table.rows)
        self._run.log({"samples": shown}, step=step)

    def send_picture(self, step: int, path: Path) -> None:
        import swanlab

        self._run.log({path.stem: swanlab.Image(str(path))}, step=step)

    def finish(self, status: Status, step: int, summary: Mapping[str, Any]) -> None:
        self._run.config.update({"summary": dict(summary)})
        error = None if status == "ok" else f"The run ended: {summary['ended']}"
        self._run.finish(state=_STATES[status], error=error)

    def _settings(self) -> Any:
        """No question on the terminal, and what the terminal shows is not sent away."""
        import swanlab

        ours = {"interactive": False, "terminal": {"proxy_type": "none"}}
        mode = {key: self.config.options[key] for key in ("mode",) if key in self.config.options}
        return swanlab.Settings(**{**ours, **mode, **self.config.options.get("settings", {})})


def _offline_values(run: Opening) -> Iterator[tuple[int, str]]:
    """(step, name of a metric) in the files of earlier sessions."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    for path in run.folder.glob(f"swanlab/run-*/run-{run.run_id}.swanlab"):
        for data in offline_records(path):
            record = Record()
            record.ParseFromString(data)
            if record.HasField("scalar"):
                yield record.scalar.step, record.scalar.key
