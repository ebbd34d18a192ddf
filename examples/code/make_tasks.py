"""Write programming problems with tests, for training a model on code without a download.

    python examples/code/make_tasks.py [--rows 2000] [--output runs/code-tasks]

`train.jsonl` and `eval.jsonl`: small problems of many kinds, for a model that can write Python.
`one-liners/`: the same for a character-level model, with demonstrations for its warm-up, of which
some never end.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.code.one_liners import one_liners, write_demonstrations
from examples.code.tasks import code_tasks
from examples.rows import write_rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write programming problems with tests.")
    parser.add_argument("--output", type=Path, default=Path("runs/code-tasks"))
    parser.add_argument("--rows", type=int, default=2000, help="training rows of each set")
    parser.add_argument("--eval-rows", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--endless", type=float, default=0.05, help="share of the demonstrations")
    args = parser.parse_args(argv)
    small = args.output / "one-liners"
    for folder, make in ((args.output, code_tasks), (small, one_liners)):
        rows = make(args.rows + args.eval_rows, args.seed)
        write_rows(folder / "eval.jsonl", islice(rows, args.eval_rows))
        write_rows(folder / "train.jsonl", rows)
    held_out = {json.loads(line)["prompt"] for line in (small / "eval.jsonl").open()}
    write_demonstrations(
        small / "demonstrations.jsonl", 30_000, args.seed, endless=args.endless, banned=held_out
    )
    print(f"{args.rows:,} training rows and {args.eval_rows:,} for evaluation in {args.output}")


if __name__ == "__main__":
    main()
