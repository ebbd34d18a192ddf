"""Trained samples as parquet, so that anybody can read what the model wrote and what it got for
it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollpacker.controller.checkpoint import fsync

_NAME = re.compile(r"steps_(\d+)-(\d+)\.parquet")


class SampleWriter:
    """Rows are gathered and written with each checkpoint: `samples/steps_000001-000010.parquet`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.step_rows: list[Mapping[str, Any]] = []
        """Of the newest step that was trained."""
        self.evaluation_rows: list[Mapping[str, Any]] = []
        """Of the newest evaluation."""
        self._rows: list[Mapping[str, Any]] = []

    def add(self, row: Mapping[str, Any]) -> None:
        """A row has at least `step`; all rows of a run have the same keys."""
        if self.step_rows and self.step_rows[0]["step"] != row["step"]:
            self.step_rows = []
        self.step_rows.append(row)
        self._rows.append(row)

    def write(self) -> None:
        if not self._rows:
            return
        import pyarrow
        import pyarrow.parquet

        self.folder.mkdir(exist_ok=True)
        first, last = self._rows[0]["step"], self._rows[-1]["step"]
        path = self.folder / f"steps_{first:06d}-{last:06d}.parquet"
        temporary = path.with_suffix(f".tmp-{os.getpid()}")
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(self._rows), temporary)
        fsync(temporary)
        temporary.replace(path)
        fsync(self.folder)
        self._rows = []


def cut_back(folder: Path, step: int) -> None:
    """Remove the files with steps after `step`. Files end at checkpoints, so none straddles one."""
    for path in folder.glob("steps_*"):
        match = _NAME.fullmatch(path.name)
        if ".tmp-" in path.name or (match is not None and int(match[2]) > step):
            path.unlink()
