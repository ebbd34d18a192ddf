"""Shows a run in SwanLab: online with an account, or offline (`options.mode`, `SWANLAB_MODE`) in
the run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollpacker.trackers.samples_table import SamplesTable
from rollpacker.trackers.sending import Opening, Status, Tracker, TrackerProblem, check_connection

_STATES = {"ok": "success", "interrupted": "aborted", "failed": "crashed"}


class SwanlabTracker(Tracker):
    name = "swanlab"
    shows_texts = False

    def check(self) -> str:
        import swanlab

        self.library = swanlab
        settings = self._settings()
        if settings.mode != "online":
            return f"{settings.mode}, in trackers/swanlab of the run's folder"
        if settings.api_key is None:
            raise TrackerProblem("no API key: run `swanlab login` or set SWANLAB_MODE=offline")
        check_connection(settings.api_host, "set SWANLAB_MODE=offline and `swanlab sync` later")
        return str(settings.web_host)

    def open(self, run: Opening) -> tuple[str, str]:
        goes_on = {} if run.run_id is None else {"id": run.run_id, "resume": "allow"}
        arguments = {
            **{"project": run.project, "name": run.run_name, "config": run.config},
            **{"log_dir": str(run.folder / "swanlab"), **self.config.options},
            **{"settings": self._settings(), **goes_on},
        }
        self.shown = shown = self.library.init(**arguments)
        is_online = shown.mode == "online"
        return shown.id, str(shown.url) if is_online else f"`swanlab sync {shown.dir}` uploads it"

    def send_samples(self, step: int, table: SamplesTable) -> None:
        shown = self.library.echarts.Table().add(table.columns, table.rows)
        self.send(step, {"samples": shown})

    def finish(self, status: Status, step: int, summary: Mapping[str, Any]) -> None:
        self.shown.config.update({"summary": dict(summary)})
        error = None if status == "ok" else f"The run ended: {summary['ended']}"
        self.shown.finish(state=_STATES[status], error=error)

    def _settings(self) -> Any:
        """Settings by which SwanLab asks nothing in the terminal, and uploads nothing of it."""
        ours = {"interactive": False, "terminal": {"proxy_type": "none"}}
        mode = {key: self.config.options[key] for key in ("mode",) if key in self.config.options}
        return self.library.Settings(**{**ours, **mode, **self.config.options.get("settings", {})})
