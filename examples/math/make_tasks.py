"""Write mathematical problems with LaTeX answers, for training without a download.

    python examples/math/make_tasks.py [--rows 2000] [--output runs/math-tasks]

Rows of `train.jsonl` and `eval.jsonl` have the columns prompt, answer, task ("math") and kind. No
prompt is in both.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.math.tasks import KINDS, math_tasks
from examples.rows import write_rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write mathematical problems with LaTeX answers.")
    parser.add_argument("--output", type=Path, default=Path("runs/math-tasks"))
    parser.add_argument("--rows", type=int, default=2000, help="training rows")
    parser.add_argument("--eval-rows", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    rows = math_tasks(args.rows + args.eval_rows, args.seed)
    write_rows(args.output / "eval.jsonl", islice(rows, args.eval_rows))
    write_rows(args.output / "train.jsonl", rows)
    print(
        f"{args.rows:,} training rows and {args.eval_rows:,} for evaluation, of {len(KINDS)} kinds,"
        f" in {args.output}"
    )


if __name__ == "__main__":
    main()
