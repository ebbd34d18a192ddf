"""Write a mixture of two tasks, math and code, as parquet. Nothing to download.

    python examples/mixed/make_tasks.py [--rows 4000] [--output runs/mixed-tasks]

Rows of `train.parquet` and `eval.parquet` have the columns task ("math" or "code"), prompt, answer
(math) and tests, as JSON text, and reference_solution (code). No prompt is in both.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.code.tasks import code_tasks
from examples.math.tasks import math_tasks

COLUMNS = ("task", "prompt", "answer", "tests", "reference_solution")


def mixed(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """`count` rows, math and code in turn."""
    tasks = (math_tasks(count, seed), code_tasks(count, seed))
    for number in range(count):
        yield _plain(next(tasks[number % 2]))


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """With the columns of both tasks. Tests differ in shape, which parquet has no type for."""
    columns = {name: row.get(name) for name in COLUMNS}
    if columns["tests"] is not None:
        columns["tests"] = json.dumps(columns["tests"])
    return columns


def write(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    schema = pyarrow.schema([(name, pyarrow.string()) for name in COLUMNS])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows), schema), path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write a mixture of math and code tasks.")
    parser.add_argument("--output", type=Path, default=Path("runs/mixed-tasks"))
    parser.add_argument("--rows", type=int, default=4000, help="training rows")
    parser.add_argument("--eval-rows", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    rows = mixed(args.rows + args.eval_rows, args.seed)
    write(args.output / "eval.parquet", islice(rows, args.eval_rows))
    write(args.output / "train.parquet", rows)
    print(f"{args.rows:,} training rows and {args.eval_rows:,} for evaluation in {args.output}")


if __name__ == "__main__":
    main()
