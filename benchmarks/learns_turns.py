"""Does a small model learn over several turns? A tool, and a game, three seeds each.

Every seed has a warm-up of its own and is trained with the shipped config. `calculator` multiplies
numbers of three digits, with a tool that it seldom calls at first; `guess` finds a number in as few
guesses as halving takes. Held-out pass@1 is sampled at temperature 1; the game's is its return over
every number, and the best possible one is computed by trying all guesses. Seconds are from the
start of a command to its end; processor seconds stand beside them, since machines are shared.

    python benchmarks/learns_turns.py [--tasks calculator guess] [--seeds 0 1 2] [--jobs 1]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lab import ROOT, bench, metrics

sys.path.insert(0, str(ROOT / "examples" / "guess"))

from game import best_return

EVAL_SAMPLES = {"calculator": 4, "guess": 32}
"""For each held-out prompt: 800 and 480 in all."""
MAX_S = 600.0
MIN_GAIN, MIN_SHARE = 0.4, 0.9
"""The least gain of the calculator's pass@1, and share of the game's best possible return."""


def rollpacker(*arguments: str) -> dict[str, float]:
    """Run the command; what it took, with the processes that it started and waited for."""
    started = time.monotonic()
    command = "import sys; from rollpacker.cli.main import main; sys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", command, *arguments], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"rollpacker {' '.join(arguments)} ended with {process.returncode}")
    return {
        "wall_s": time.monotonic() - started,
        "processor_s": usage.ru_utime + usage.ru_stime,
        "load_average_1min": os.getloadavg()[0],
    }


def one_run(task: str, seed: int, folder: Path) -> dict[str, Any]:
    model, run = folder / f"{task}-{seed}-warm", folder / f"{task}-{seed}"
    warmup = rollpacker("warmup", f"configs/{task}-warmup.yaml", f"seed={seed}", f"output={model}")
    train = rollpacker(
        "train",
        f"configs/{task}.yaml",
        f"name={run.name}",
        f"seed={seed}",
        f"runs_dir={folder}",
        f"model.path={model}",
        f"eval.samples_per_prompt={EVAL_SAMPLES[task]}",
    )
    rows = metrics(run)
    curve = [[row["step"], row["eval/pass@1"]] for row in rows if "eval/pass@1" in row]
    steps = [row for row in rows if "episodes/turns/mean" in row]
    told = f"{task}, seed {seed}: pass@1 {curve[0][1]:.3f} -> {curve[-1][1]:.3f}"
    wall_s = warmup["wall_s"] + train["wall_s"]
    calls = [round(row.get("tools/calls", 0.0), 2) for row in steps[:: len(steps) // 5]]
    print(f"{told}, {wall_s:.0f} s, calls per trajectory {calls}", flush=True)
    return {
        "seed": seed,
        "warmup": warmup,
        "train": train,
        "wall_s": wall_s,
        "before": curve[0][1],
        "after": curve[-1][1],
        "curve": curve,
        "tool_calls": [[row["step"], row.get("tools/calls", 0.0)] for row in steps],
        "turns": [[row["step"], row["episodes/turns/mean"]] for row in steps],
    }


def verdict(task: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Say what was asked for, and whether each seed has it."""
    in_time = all(run["wall_s"] < MAX_S for run in runs)
    if task == "calculator":
        gains = [run["after"] - run["before"] for run in runs]
        grown = [
            statistics.mean(calls for _, calls in run["tool_calls"][-5:])
            - statistics.mean(calls for _, calls in run["tool_calls"][:5])
            for run in runs
        ]
        met = min(gains) >= MIN_GAIN and min(grown) > 0
        return {"gains": gains, "calls_grown": grown, "met": met, "in_time": in_time}
    best = best_return()
    shares = [run["after"] / best for run in runs]
    met = min(shares) >= MIN_SHARE
    return {"best_return": best, "shares_of_best": shares, "met": met, "in_time": in_time}


def main(
    tasks: Sequence[str] = tuple(EVAL_SAMPLES),
    seeds: Sequence[int] = (0, 1, 2),
    jobs: int = 1,
    folder: Path | None = None,
) -> dict[str, Any]:
    result: dict[str, Any] = {"jobs": jobs}
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(jobs) as pool:
        place = folder or Path(temporary)
        for task in tasks:
            runs = list(pool.map(lambda seed, task=task: one_run(task, seed, place), seeds))
            result[task] = {"runs": runs, **verdict(task, runs)}
            print(task, json.dumps(verdict(task, runs)), flush=True)
    return result


if __name__ == "__main__":
    bench(main, tasks=EVAL_SAMPLES)
