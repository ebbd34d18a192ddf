"""What the tracking libraries hold of a run, read from their own files without their front ends."""

from __future__ import annotations

import json
import sqlite3
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Values = dict[str, dict[int, list[Any]]]
"""Name -> step -> what was logged for it: one value, unless something was sent twice."""


def expected(metrics: Path, *, texts: bool) -> Values:
    """What `metrics.jsonl` says."""
    values: Values = defaultdict(lambda: defaultdict(list))
    for line in metrics.read_text().splitlines():
        row = json.loads(line)
        step = row.pop("step")
        for name, value in row.items():
            if value is not None and (texts or not isinstance(value, str)):
                values[name][step].append(value)
    return plain(values)


def plain(values: Values) -> Values:
    return {name: dict(steps) for name, steps in values.items()}


def wandb_history(folder: Path) -> list[dict[str, Any]]:
    """Every row of every offline run in `folder`, in the order of time."""
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row.item}
        for record in wandb_records(folder)
        if record.WhichOneof("record_type") == "history"
        for row in [record.history]
    ]


def wandb_records(folder: Path) -> Iterator[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in level_db_log(path.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            yield record


def level_db_log(data: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format after a header of 7 bytes. A cut-off one ends it."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        if kind == 0 or at + 7 + size > len(data):
            return
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def wandb_values(folder: Path) -> Values:
    values: Values = defaultdict(lambda: defaultdict(list))
    for row in wandb_history(folder):
        for name, value in row.items():
            if not name.startswith(("_", "samples/", "timeline")) and name != "step":
                values[name][row["step"]].append(value)
    return plain(values)


def mlflow_run(folder: Path) -> Path:
    """The run's folder in MLflow's store of files."""
    run = json.loads((folder / "mlflow.json").read_text())["run_id"]
    (found,) = folder.glob(f"mlflow/*/{run}")
    return found


def mlflow_values(folder: Path, names: list[str]) -> Values:
    """`names` are those of `metrics.jsonl`."""
    from rollpacker.trackers.mlflow import metric_name

    files = mlflow_run(folder) / "metrics"
    held = {str(path.relative_to(files)) for path in files.rglob("*") if path.is_file()}
    assert held == {metric_name(name, in_files=True) for name in names}
    values: Values = defaultdict(lambda: defaultdict(list))
    for name in names:
        for line in (files / metric_name(name, in_files=True)).read_text().splitlines():
            _, value, step = line.split()
            values[name][int(step)].append(float(value))
    return plain(values)


def trackio_rows(home: Path, project: str) -> list[tuple[str, int, dict[str, Any]]]:
    """(run id, step, row) in the order of writing."""
    with sqlite3.connect(home / f"{project}.db") as base:
        rows = base.execute("select run_id, step, metrics from metrics order by id").fetchall()
    return [(run, step, json.loads(metrics)) for run, step, metrics in rows]


def trackio_values(home: Path, project: str) -> Values:
    values: Values = defaultdict(lambda: defaultdict(list))
    for _, step, row in trackio_rows(home, project):
        for name, value in row.items():
            if not name.startswith(("_", "summary/", "samples", "timeline")):
                values[name][step].append(value)
    return plain(values)


def swanlab_records(folder: Path) -> Iterator[Any]:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    for path in sorted(folder.glob("swanlab/run-*/*.swanlab")):
        for data in level_db_log(path.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            yield record


def swanlab_values(folder: Path) -> Values:
    values: Values = defaultdict(lambda: defaultdict(list))
    for record in swanlab_records(folder):
        if record.WhichOneof("record_type") == "scalar":
            one = record.scalar
            if one.key.startswith("__swanlab__."):  # its own of the machine, where a run takes long
                continue
            values[one.key][one.step].append(one.value.number)
    return plain(values)
