"""A made-up tracker: one file on `Tracker`, its name and its row in the room of trackers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollpacker.config.schema import RunConfig
from rollpacker.run.parts.audience import build_trackers
from rollpacker.run.ports.audience import Audience, ToldRun
from rollpacker.trackers.by_name import TRACKERS
from rollpacker.trackers.sending import Opening, Status, Tracker
from rollpacker.trackers.tracker import TrackerConfig


class Notebook(Tracker):
    """Writes all that it is told into a list."""

    name = "notebook"
    rows: list[tuple[Any, ...]]

    def missing(self) -> str | None:
        return None

    def check(self) -> str:
        self.rows = []
        return "a list"

    def open(self, run: Opening) -> tuple[str, str]:
        self.rows.append(("open", run.run_name, run.last_step))
        return "page 1", "shown in a list"

    def send(self, step: int, row: Mapping[str, Any]) -> None:
        self.rows.append(("row", step, dict(row)))

    def finish(self, status: Status, step: int, summary: Mapping[str, Any]) -> None:
        self.rows.append(("end", status, step))


def test_a_run_tells_it_of_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRACKERS, "notebook", Notebook)
    entry: Any = TrackerConfig(name="notebook")  # type: ignore[arg-type]  # one more of TrackerName
    trackers = build_trackers(SimpleNamespace(tracker_configs=(entry,)))  # type: ignore[arg-type]  # all that is read of it
    run = ToldRun(name="drill", folder=tmp_path, config={}, total_steps=2, resumed_step=None)

    async def call(function: Any) -> None:
        function()

    audience = Audience(run, trackers=trackers, call=call, row_so_far=lambda step: {})
    clock = SimpleNamespace(now=lambda: 0.0)
    bus: Any = SimpleNamespace(clock=clock, note=lambda *told: None)
    audience.join(bus, None, stop=lambda reason: None, observe=lambda: None)
    asyncio.run(audience.begin(0))
    for step in (1, 2):
        audience.row_written(step, {"actor/loss": step / 2}, False)
    audience.end("every step is done")
    (notebook,) = trackers
    assert isinstance(notebook, Notebook)
    assert notebook.rows == [
        ("open", "drill", -1),
        ("row", 1, {"actor/loss": 0.5}),
        ("row", 2, {"actor/loss": 1.0}),
        ("end", "ok", 2),
    ]


def test_the_config_knows_trackers_by_their_room_alone() -> None:
    """The names are of `trackers/tracker.py`: the config's own files list none."""
    import inspect

    from rollpacker.config import check, schema

    for module in (schema, check):
        assert not any(name in inspect.getsource(module) for name in ("mlflow", "swanlab"))
    assert RunConfig.__dataclass_fields__["trackers"].type == (
        "tuple[TrackerName | TrackerConfig, ...]"
    )
