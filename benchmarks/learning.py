"""Does the quickstart learn, and does tail batching cost any of it? Paired seeds.

Every seed gets its own demonstrations, warm-up and training run, twice from the same warmed-up
weights: with tail batching (1.25, 1.25) and without. Held-out pass@1 is sampled at temperature 1
with several samples per prompt, before and after. The interval of the paired difference is
Student's.

    python benchmarks/learning.py [--seeds 0 1 2 3 4 5] [--jobs 2]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from machine import ROOT, write_result

STUDENT_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306}
"""Two-sided 95 % points by degrees of freedom."""


def rollpacker(*arguments: str) -> None:
    command = [str(Path(sys.executable).parent / "rollpacker"), *arguments]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def warm_up(seed: int, folder: Path) -> Path:
    """The warmed-up model of a seed."""
    demonstrations, model = folder / f"demonstrations-{seed}", folder / f"warm-{seed}"
    script = ROOT / "examples" / "quickstart" / "make_demonstrations.py"
    command = [sys.executable, str(script), "--output", str(demonstrations), "--seed", str(seed)]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    rollpacker(
        "warmup",
        "configs/quickstart-warmup.yaml",
        f"seed={seed}",
        f"output={model}",
        f"stages.0.path={demonstrations / 'steps.jsonl'}",
        f"stages.1.path={demonstrations / 'hesitant.jsonl'}",
    )
    return model


def train(seed: int, model: Path, folder: Path, *, tail_batching: bool) -> dict[str, Any]:
    """One run; its summary and learning curve."""
    name = f"{'on' if tail_batching else 'off'}-{seed}"
    rollpacker(
        "train",
        "configs/quickstart.yaml",
        f"seed={seed}",
        f"name={name}",
        f"runs_dir={folder}",
        f"model.path={model}",
        f"tail_batching.enabled={str(tail_batching).lower()}",
        "eval.samples_per_prompt=4",
        "save_samples=false",
    )
    run = folder / name
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    curve = {row["step"]: row["eval/pass@1"] for row in rows if "eval/pass@1" in row}
    lengths = [row for row in rows if "response_length/max" in row]
    ratios = [row["response_length_all/max"] / row["response_length_all/median"] for row in lengths]
    summary = json.loads((run / "summary.json").read_text())
    return {
        "curve": curve,
        "before": curve[min(curve)],
        "after": curve[max(curve)],
        "prompts_trained": sum(row["round/prompts_trained"] for row in lengths),
        "steps": len(lengths),
        "longest_over_median_mean": statistics.mean(ratios),
        "wall_s": summary["wall_s"],
        "rollout_s": sum(row["timing_s/gen"] for row in lengths),
    }


def one_seed(seed: int, folder: Path) -> dict[str, Any]:
    model = warm_up(seed, folder)
    result: dict[str, Any] = {"seed": seed}
    for arm in ("on", "off"):
        result[arm] = train(seed, model, folder, tail_batching=arm == "on")
        print(
            f"seed {seed}, tail batching {arm}: pass@1 {result[arm]['before']:.3f} -> "
            f"{result[arm]['after']:.3f}",
            flush=True,
        )
    return result


def paired_interval(differences: list[float]) -> tuple[float, float, float]:
    """Mean and 95 % interval."""
    mean = statistics.mean(differences)
    if len(differences) < 2:
        return mean, math.nan, math.nan
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    half = STUDENT_95[len(differences) - 1] * error
    return mean, mean - half, mean + half


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4, 5])
    parser.add_argument("--jobs", type=int, default=2, help="seeds at the same time")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(args.jobs) as pool:
        seeds = list(pool.map(lambda seed: one_seed(seed, Path(temporary)), args.seeds))
    mean, low, high = paired_interval([s["on"]["after"] - s["off"]["after"] for s in seeds])
    result = {
        "seeds": seeds,
        "gain_with_tail_batching": [s["on"]["after"] - s["on"]["before"] for s in seeds],
        "gain_without": [s["off"]["after"] - s["off"]["before"] for s in seeds],
        "on_minus_off": {"mean": mean, "low": low, "high": high, "confidence": 0.95},
    }
    print(json.dumps({k: v for k, v in result.items() if k != "seeds"}, indent=1))
    write_result("learning", result)


if __name__ == "__main__":
    main()
