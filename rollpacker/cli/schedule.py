"""`rollpacker plan SCENARIO --csv FILE`: writes the order in which a trainer's pipeline stages
work, as a file that torch loads."""

from __future__ import annotations

import argparse
from pathlib import Path

from rollpacker.cli.arguments import check_file


def add_csv(parser: argparse.ArgumentParser) -> None:
    """Add the option `--csv` to the parser of `rollpacker plan`."""
    parser.add_argument(
        "--csv",
        metavar="FILE",
        help="instead of a search: write the schedule of the scenario's train.pipeline, for the "
        "micro-batches of its first step, as torch and torchtitan load it",
    )


def write_schedule(args: argparse.Namespace) -> int:
    """Write the order in which the pipeline stages work, in the scenario's first step and for the
    slowest copy of the trainer. Returns the exit code. Raises `ValueError` for a user's mistake."""
    import dataclasses
    import json

    from rollpacker.pipeline.plan.order import orders_to_csv
    from rollpacker.run.error_messages import naming
    from rollpacker.sim.scenario import load_scenario
    from rollpacker.sim.simulate import simulate
    from rollpacker.writing import replacing

    _check(args)
    scenario = load_scenario(args.target, args.overrides)
    if scenario.train.pipeline is None:
        raise ValueError(
            f"--csv {args.csv}: {args.target} has no train.pipeline; set train.pipeline.stages"
        )
    found = simulate(dataclasses.replace(scenario, steps=1)).pipeline
    assert found is not None, "a step without a sweep"
    out = Path(args.csv)
    with naming(out.absolute().parent), replacing(out) as temporary:
        temporary.write_text(orders_to_csv(found.last.orders), encoding="utf-8")
    if args.json:
        print(json.dumps(found.to_plain() | {"csv": str(out)}, allow_nan=False))
        return 0
    count = len(found.last.orders[0]) // 3
    print(
        f"Wrote {out}: {found.stages} stages, {count} micro-batches, {found.order} over "
        f"{found.links} links. A sweep takes {found.sweep_s:.3f} s.\n"
        "torch: _PipelineScheduleRuntime(...)._load_csv(FILE, format='compute_only'); torchtitan: "
        "parallelism.pipeline_parallel_schedule_csv."
    )
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raise `ValueError`, before any file is read, for options that do not go together."""
    for option, given in (("--write", args.write), ("--max-shift", args.max_shift)):
        if given is not None:
            raise ValueError(f"--csv and {option} exclude each other: --csv searches nothing")
    path = Path(args.csv)
    if path.suffix != ".csv":
        raise ValueError(f"--csv {args.csv}: the name must end in .csv")
    check_file("--csv", args.csv)
    if Path(args.target).suffix not in (".yaml", ".yml"):
        raise ValueError(f"--csv needs a scenario with train.pipeline, and {args.target} is none")
