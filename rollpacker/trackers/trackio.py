"""trackio: on this machine, where its own `trackio show` looks (`TRACKIO_DIR`), or in a Space."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from rollpacker.imports import missing
from rollpacker.trackers.samples_table import SamplesTable
from rollpacker.trackers.sending import (
    Opened,
    Opening,
    Row,
    Status,
    Tracker,
    TrackerProblem,
)


class TrackioTracker(Tracker):
    name: ClassVar[str] = "trackio"
    _run: Any = None

    def missing(self) -> str | None:
        return missing("trackio", extra="trackio", what="the tracker trackio")

    def check(self) -> str:
        from trackio.utils import TRACKIO_DIR

        remote = self.config.options.get("space_id") or self.config.options.get("server_url")
        return str(remote or TRACKIO_DIR)

    def open(self, run: Opening) -> Opened:
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        arguments = {
            "project": run.project,
            "name": run.run_name,
            "config": dict(run.config),
            "resume": "never" if run.run_id is None else "allow",
            "embed": False,
            **self.config.options,
        }
        self._run = opened = trackio.init(**arguments)
        held = None
        if run.run_id is not None and opened.url is None:
            rows = SQLiteStorage.get_logs(opened.project, opened.name, run_id=opened.id)
            held = [(row["step"], name) for row in rows for name in row]
            if opened.id != run.run_id and rows:
                raise TrackerProblem(
                    f"another run named {opened.name} was begun in the project {opened.project} "
                    "since, and trackio goes on with the latest: set trackers[].run_name"
                )
        where = opened.url or f'`trackio show --project "{run.project}"` shows it'
        return Opened(run_id=opened.id, where=where, held=held)

    def send(self, step: int, row: Row) -> None:
        self._run.log(row, step=step)

    def send_samples(self, step: int, table: SamplesTable) -> None:
        import trackio

        self._run.log({"samples": trackio.Table(columns=table.columns, data=table.rows)}, step=step)

    def send_picture(self, step: int, path: Path) -> None:
        import trackio

        self._run.log({path.stem: trackio.Image(str(path))}, step=step)

    def finish(self, status: Status, step: int, summary: Mapping[str, Any]) -> None:
        self._run.log({f"summary/{key}": value for key, value in summary.items()}, step=step)
        self._run.finish()
