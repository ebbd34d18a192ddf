"""Writes samples as parquet, so that anybody can read what the model wrote and which reward it got.

`docs/run-folder.md` has every column. Rows of training are gathered and written with each
checkpoint, those of an evaluation at once. A resume removes the files after its checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollpacker.writing import replacing

_NAME = re.compile(r"steps?_(?:\d+-)?(\d+)\.parquet")
"""Matches the name of a file of samples; the group is the last step that the file covers."""

SampleRow = Mapping[str, Any]

COLUMN_TYPES = {
    "step": "int64",
    "num_tokens": "int64",
    "reward": "float64",
    "check_s": "float64",
    "advantage": "float64",
    "loss_weight": "float64",
    "trained": "bool",
    "passed": "bool",
}
"""Types of columns by name. Other columns are float64 if they begin with `reward/`, else text.
Types are fixed and not inferred, so that a column without any value has the same type in every
file."""


class SampleWriter:
    """Writes `samples/steps_000001-000010.parquet` and `evaluations/step_000010.parquet` into a
    run's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.step_rows: Sequence[SampleRow] = ()
        """Rows of the latest step that was trained."""
        self.evaluation_rows: Sequence[SampleRow] = ()
        """Rows of the latest evaluation."""
        self._waiting: list[SampleRow] = []

    def add(self, rows: Sequence[SampleRow]) -> None:
        """Keep a step's rows for the next `write`. Rows have the same keys in the whole run, `step`
        among them, except for `extra/...` (values that rewards logged)."""
        self.step_rows = rows
        self._waiting += rows

    def write(self) -> None:
        """Write the rows that were added since the last call into a new file, durably."""
        if self._waiting:
            first, last = self._waiting[0]["step"], self._waiting[-1]["step"]
            _write(
                self._folder / "samples" / f"steps_{first:06d}-{last:06d}.parquet", self._waiting
            )
            self._waiting = []

    def write_evaluation(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Write the rows of the evaluation after `step` steps. An earlier file of that step is
        replaced."""
        self.evaluation_rows = rows
        if rows:
            _write(self._folder / "evaluations" / f"step_{step:06d}.parquet", rows)


def _write(path: Path, rows: Sequence[SampleRow]) -> None:
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(exist_ok=True)
    columns = {
        column: pyarrow.array(
            [storable(_typed(column, row.get(column))) for row in rows],
            pyarrow.type_for_alias(_type_of(column)),
        )
        for column in dict.fromkeys(column for row in rows for column in row)
    }
    with replacing(path, durable=True) as temporary:
        pyarrow.parquet.write_table(pyarrow.table(columns), temporary, compression="zstd")


def _type_of(column: str) -> str:
    return COLUMN_TYPES.get(column, "float64" if column.startswith("reward/") else "string")


def _typed(column: str, value: Any) -> Any:
    """Returns the value; in columns `extra/...`, whose values may have any types, as text."""
    return str(value) if column.startswith("extra/") and value is not None else value


def storable(value: Any) -> Any:
    """Returns the value. In a text, each lone surrogate, which UTF-8 cannot encode, becomes
    `\\udXXX`."""
    if isinstance(value, str) and not value.isascii():
        return value.encode("utf-8", "backslashreplace").decode()
    return value


def cut_back(folder: Path, step: int) -> None:
    """Remove the files of samples or evaluations that cover steps after `step`. As every file of
    samples ends at a checkpoint, no file covers steps before and after one."""
    for path in (*folder.glob("steps_*"), *folder.glob("step_*")):
        match = _NAME.fullmatch(path.name)
        if ".tmp" in path.name or (match is not None and int(match[1]) > step):
            path.unlink()
