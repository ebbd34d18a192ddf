"""Metrics of a run as columns over its steps, reduced to few enough points for a picture."""

from __future__ import annotations

import json
import warnings
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

MAX_POINTS = 1000
"""Maximum number of points of a column. A run of more than twice as many steps is divided into this
many buckets, and a point has the mean, minimum and maximum of a bucket's steps."""

_NAN = float("nan")


class MetricColumns:
    """Gathers rows of metrics, in the order of their steps, as columns of numbers. Metrics that are
    texts are left out."""

    def __init__(self) -> None:
        self.steps = array("l")
        self._columns: dict[str, array[float]] = {}
        self._places: dict[int, int] = {}

    def add(self, step: int, row: Mapping[str, Any]) -> None:
        """Add the row of a further step."""
        place = self._places[step] = len(self.steps)
        self.steps.append(step)
        for name, column in self._columns.items():
            column.append(_number(row.get(name)))
        for name, value in row.items():
            if name not in self._columns and _is_number(value):
                self._columns[name] = array("d", [_NAN]) * place + array("d", [_number(value)])

    def complete(self, step: int, row: Mapping[str, Any]) -> None:
        """Add to a step's row the metrics that it lacks. An unknown step is ignored."""
        place = self._places.get(step)
        if place is None:
            return
        for name, value in row.items():
            if name == "step" or not _is_number(value):
                continue
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = array("d", [_NAN]) * len(self.steps)
            if column[place] != column[place]:
                column[place] = _number(value)

    def plain(self) -> dict[str, Any]:
        """The columns as arrays, for the page. `of`: number of steps in each bucket (group of steps
        that is one point). `step`: the last step of each bucket. With `of` > 1 a column has the
        `mean`, `min` and `max` of each bucket, else only `mean`."""
        steps = np.asarray(self.steps, dtype=np.int32)
        of = 1 if len(steps) <= 2 * MAX_POINTS else -(-len(steps) // MAX_POINTS)
        columns = {name: bucketed(column, of) for name, column in sorted(self._columns.items())}
        ends = np.minimum(np.arange(of, len(steps) + of, of), len(steps)) - 1
        return {"num_steps": len(steps), "of": of, "step": steps[ends], "columns": columns}


class MetricRows:
    """Reads `metrics.jsonl` while it grows, since no other file has values that callbacks logged.
    `read` returns the rows of steps that were written since the last call. A file that a resume has
    made shorter is read anew. Lines that are no row of metrics are left out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0

    def read(self) -> list[dict[str, Any]]:
        try:
            with self.path.open("rb") as file:
                if self.path.stat().st_size < self._read:
                    self._read = 0
                file.seek(self._read)
                text = file.read()
        except OSError:
            return []
        whole = text.rfind(b"\n") + 1
        self._read += whole
        rows = []
        for line in text[:whole].splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append(row)
        return [row for row in rows if not any(name.startswith("eval/") for name in row)]


def bucketed(column: Sequence[float], of: int) -> dict[str, Any]:
    """Mean, minimum and maximum of every `of` consecutive values, NaN left out; a bucket of NaN
    alone has NaN. With `of` 1 only the values themselves are returned, as the mean."""
    values = np.asarray(column, dtype=np.float64)
    if of == 1:
        return {"mean": values.astype(np.float32)}
    padded = np.full(-(-len(values) // of) * of, np.nan)
    padded[: len(values)] = values
    rows = padded.reshape(-1, of)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # buckets without a value
        found = {"mean": np.nanmean(rows, 1), "min": np.nanmin(rows, 1), "max": np.nanmax(rows, 1)}
    return {name: value.astype(np.float32) for name, value in found.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _number(value: Any) -> float:
    return float(value) if _is_number(value) else _NAN
