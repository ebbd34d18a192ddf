"""Does the quickstart learn, and does tail batching cost any of it? Paired seeds.

Every seed gets its own demonstrations and warm-up, and runs from the same weights with tail
batching and without. Held-out pass@1 is sampled at temperature 1, every few steps. Seconds to a
pass@1 are those of steps alone; a seed's goal is a share of the lower of its two final values. Two
more runs per seed have a shadow (`shadow.py`): how much shorter or longer are trained responses
than the policy would have written, with tail batching as it is and as published?

    python benchmarks/learning.py [--seeds 0 1 2 3 4 5] [--jobs 2]
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lab import ROOT, bench, in_process, metrics, paired_interval, rollpacker
from shadow import facts

ARMS = {
    "on": (),
    "off": ("tail_batching.enabled=false",),
    "published": ("tail_batching.selection=published", "tail_batching.prompt_factor=1.25"),
}
EVALUATE_EVERY = 20
SHADOW_STEPS = 100
"""Steps of the runs with a shadow: those in which most is learned."""
GOAL = 0.95
"""The share of a seed's lower final pass@1 that both arms are to reach."""


def warm_up(seed: int, folder: Path, config: str = "configs/quickstart-warmup.yaml") -> Path:
    """The warmed-up model of a seed."""
    demonstrations, model = folder / f"demonstrations-{seed}", folder / f"warm-{seed}"
    if (model / "config.json").exists():
        return model
    script = ROOT / "examples" / "quickstart" / "make_demonstrations.py"
    command = [sys.executable, str(script), "--output", str(demonstrations), "--seed", str(seed)]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    rollpacker(
        *("warmup", config, f"seed={seed}", f"output={model}"),
        f"stages.0.path={demonstrations / 'steps.jsonl'}",
        f"stages.1.path={demonstrations / 'hesitant.jsonl'}",
    )
    return model


def settings(seed: int, model: Path, folder: Path, arm: str) -> list[str]:
    return [
        *("configs/quickstart.yaml", f"seed={seed}", f"name={arm}-{seed}", f"runs_dir={folder}"),
        *(f"model.path={model}", "save_samples=false", *ARMS[arm]),
    ]


def train(seed: int, model: Path, folder: Path, arm: str) -> dict[str, Any]:
    """One run; its learning curve, by step and by seconds."""
    rollpacker(
        "train",
        *settings(seed, model, folder, arm),
        "eval.samples_per_prompt=4",
        f"eval.every_steps={EVALUATE_EVERY}",
    )
    run = folder / f"{arm}-{seed}"
    rows = metrics(run)
    curve, seconds = {}, 0.0
    for row in rows:
        seconds += row.get("timing_s/step", 0.0)
        if "eval/pass@1" in row:
            curve[row["step"]] = (seconds, row["eval/pass@1"])
    lengths = [row for row in rows if "response_length/max" in row]
    return {
        "curve": [[step, *point] for step, point in sorted(curve.items())],
        "before": curve[min(curve)][1],
        "after": curve[max(curve)][1],
        "steps": len(lengths),
        "seconds": seconds,
        "rollout_s": sum(row["timing_s/gen"] for row in lengths),
        **facts(run / "events.jsonl"),
    }


def seconds_to(goal: float, curve: Sequence[tuple[int, float, float]]) -> float:
    """Seconds of steps until the curve first reaches this pass@1."""
    points = [(seconds, value) for _, seconds, value in curve]
    for (start_s, start), (end_s, end) in itertools.pairwise(points):
        if end >= goal:
            share = (goal - start) / (end - start) if end > start else 0.0
            return start_s + max(share, 0.0) * (end_s - start_s)
    raise ValueError(f"no evaluation reached {goal}")


def one_seed(seed: int, folder: Path) -> dict[str, Any]:
    model = warm_up(seed, folder)
    result: dict[str, Any] = {"seed": seed}
    arms = ("on", "off") if seed % 2 else ("off", "on")
    for arm in arms:
        result[arm] = train(seed, model, folder, arm)
        told = {key: result[arm][key] for key in ("before", "after", "seconds")}
        print(f"seed {seed}, tail batching {arm}: {told}", flush=True)
    goal = GOAL * min(result[arm]["after"] for arm in arms)
    result["goal"] = goal
    for arm in arms:
        result[arm]["seconds_to_goal"] = seconds_to(goal, result[arm]["curve"])
    for arm in ("on", "published"):
        result[f"shadow {arm}"] = in_process(
            str(ROOT / "benchmarks" / "shadow.py"),
            *settings(seed, model, folder / "shadows", arm),
            *("eval.every_steps=null", f"train.steps={SHADOW_STEPS}"),
        )
        print(f"seed {seed}, shift {arm}: {result[f'shadow {arm}']['shift']:+.1%}", flush=True)
    return result


def _interval(values: list[float]) -> dict[str, float]:
    mean, low, high = paired_interval(values)
    return {"mean": mean, "low": low, "high": high, "confidence": 0.95}


def main(
    seeds: Sequence[int] = (0, 1, 2, 3, 4, 5), jobs: int = 2, folder: Path | None = None
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(jobs) as pool:
        place = folder or Path(temporary)
        found = list(pool.map(lambda seed: one_seed(seed, place), seeds))

    def of(*pairs: tuple[str, str]) -> list[list[float]]:
        return [[one[arm][what] for one in found] for arm, what in pairs]

    def ratio(what: str) -> list[float]:
        return [off / on for off, on in zip(*of(("off", what), ("on", what)), strict=True)]

    after = of(("on", "after"), ("off", "after"))
    return {
        "seeds": found,
        "on_minus_off": _interval([on - off for on, off in zip(*after, strict=True)]),
        "shift": _interval(*of(("shadow on", "shift"))),
        "shift_published": _interval(*of(("shadow published", "shift"))),
        "off_over_on_seconds_to_goal": _interval(ratio("seconds_to_goal")),
        "off_over_on_rollout_s": _interval(ratio("rollout_s")),
    }


if __name__ == "__main__":
    bench(main)
