"""Shows a run in trackio: on this machine (`TRACKIO_DIR`), or in a Space of Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollpacker.trackers.sending import Opening, Status, Tracker, TrackerProblem


class TrackioTracker(Tracker):
    name = "trackio"

    def check(self) -> str:
        import trackio
        from trackio.utils import TRACKIO_DIR

        self.library = trackio
        remote = self.config.options.get("space_id") or self.config.options.get("server_url")
        return str(remote or TRACKIO_DIR)

    def open(self, run: Opening) -> tuple[str, str]:
        from trackio.sqlite_storage import SQLiteStorage

        how = {"resume": "never" if run.run_id is None else "allow", "embed": False}
        self.shown = shown = self.library.init(
            **{"project": run.project, "name": run.run_name, "config": run.config},
            **{**how, **self.config.options},
        )
        is_another = run.run_id not in (None, shown.id) and shown.url is None
        # A run that was killed early may not be there at all, and then the one found is empty.
        if is_another and SQLiteStorage.get_logs(shown.project, shown.name, run_id=shown.id):
            raise TrackerProblem(
                f"another run named {shown.name} was begun in the project {shown.project} since, "
                "and trackio goes on with the latest: set trackers[].run_name"
            )
        return shown.id, shown.url or f'`trackio show --project "{run.project}"` shows it'

    def finish(self, status: Status, step: int, summary: Mapping[str, Any]) -> None:
        self.send(step, {f"summary/{key}": value for key, value in summary.items()})
        self.shown.finish()
