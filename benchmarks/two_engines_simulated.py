"""Two engines, simulated against real: runs with tail batching, each from its own log.

The quickstart's frozen model with two embedded engines in processes of one thread, with
`rollout.routing=spread` and with `group`. Mean seconds of generation against those of `rollpacker
simulate --from RUN`, within 15 %; beside it one engine, and what each log says of the other
routing.

    python benchmarks/two_engines_simulated.py [--steps 120] [--quick]
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab import ROOT, bench
from sim_vs_real import COMMON, MEAN_BOUND, real_seconds

ARMS = {
    "spread": ("rollout.engines=2", "rollout.routing=spread", "train.threads=2"),
    "group": ("rollout.engines=2", "rollout.routing=group", "train.threads=2"),
    "one engine": ("rollout.engines=1",),
}
BOUND = ("spread", "group")
OTHER = {"spread": "group", "group": "spread"}


def record(config: Path, folder: Path, name: str, num_steps: int) -> Path:
    """A real run; its folder."""
    import rollpacker

    run = folder / name.replace(" ", "-")
    overrides = [*COMMON, *ARMS[name], "tail_batching.enabled=true", f"train.steps={num_steps}"]
    overrides += [f"name={run.name}", f"runs_dir={folder.resolve()}"]
    with (folder / f"{run.name}.txt").open("w") as said, contextlib.redirect_stdout(said):
        rollpacker.train(config, overrides)
    return run


def compare(run: Path, name: str) -> dict[str, Any]:
    """A row of results."""
    from rollpacker.sim.whatif import load_run

    model = load_run(run)
    real = real_seconds(run)["mean"]
    same = rollout_s(model.simulate().steps)
    other = None
    if name in OTHER:
        other = rollout_s(model.simulate([f"rollout.routing={OTHER[name]}"]).steps)
    mean = statistics.fmean(real)
    return {
        "arm": name,
        "rounds": len(real),
        "rounds_left_out_of_the_fit": model.fitted.num_skipped,
        "drafted": model.fitted.drafted,
        "real_s": mean,
        "real_s_standard_error": statistics.stdev(real) / len(real) ** 0.5,
        "simulated_s": same,
        "ratio": same / mean,
        "simulated_with_the_other_routing_s": other,
        "met": abs(same / mean - 1) <= MEAN_BOUND if name in BOUND else None,
    }


def rollout_s(steps: Sequence[Any]) -> float:
    return statistics.fmean(step.rollout_s for step in steps)


def main(
    config: Path = ROOT / "configs" / "quickstart.yaml",
    steps: int = 120,
    keep: Path | None = None,
    quick: bool = False,
) -> dict[str, Any]:
    """`steps`: of each run. `keep`: a folder for the runs, which else are thrown away."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    num_steps = 15 if quick else steps
    with tempfile.TemporaryDirectory() as temporary:
        folder = keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        rows = [compare(record(config, folder, name, num_steps), name) for name in ARMS]
    met = all(row["met"] for row in rows if row["arm"] in BOUND)
    told = {"config": config.name, "steps": num_steps, "bound": MEAN_BOUND}
    return {**told, "met": met, "rows": rows}


if __name__ == "__main__":
    bench(main, holds=lambda found: found["met"])
