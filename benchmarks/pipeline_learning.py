"""Does RL in two pipeline stages learn what it learns in one process?

Real runs of configs/quickstart.yaml from the same weights, with `train.processes=1` and in two
stages, nothing else changed.

    grpo    three seeds: weights after ten steps, held-out pass@1 before and after, and the first
            step that was trained on another sample (a last bit flips a sampled token now and then;
            from there on the two are different runs of one algorithm)
    others  PPO (gae, a critic), distillation (its teacher is GRPO's in stages) and LoRA: pass@1
            before and after in stages, and weights after ten steps against one process

    python benchmarks/pipeline_learning.py [--only grpo ppo] [--steps 120]

Needs the quickstart's warmed-up model in runs/ (`make quickstart` leaves it there).
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet
from algorithms import SETTINGS, TARGET
from lab import bench, earlier, pass_rates, rollpacker
from trainer_resume import tensors

LAYOUTS = {
    "one process": ("train.processes=1",),
    "two stages": ("train.processes=2", "train.pipeline.stages=2"),
}
OTHERS: dict[str, list[str]] = {
    "ppo": ["algorithm.name=ppo", "algorithm.loss_aggregation=null", *SETTINGS["ppo"]],
    "distillation": ["algorithm.name=distillation", "algorithm.loss_aggregation=null"],
    "lora": [
        "model.lora={rank: 16, alpha: 32, target_modules: [all-linear]}",
        "train.learning_rate=4.0e-3",
    ],
}
NAMES = ("grpo", *OTHERS)
SEEDS = (0, 1, 2)
COMPARED_STEP = 10
WEIGHT_TOLERANCE = 1e-5
PASS_TOLERANCE = 0.05


def train(folder: Path, name: str, layout: str, seed: int, *settings: str) -> Path:
    """A run's folder, with a checkpoint of every tenth step."""
    rollpacker(
        *("train", "configs/quickstart.yaml", f"name={name}", f"runs_dir={folder}", f"seed={seed}"),
        *("eval.samples_per_prompt=4", "checkpoint={every_steps: 10, keep_last: 1000}"),
        *LAYOUTS[layout],
        *settings,
    )
    return folder / name


def rates_of(run: Path) -> dict[str, float]:
    before, *_, after = pass_rates(run)
    return {"before": before, "after": after, "gain": after - before}


def compared(one: Path, other: Path) -> dict[str, Any]:
    """Weights of two runs after the same number of steps, whose largest difference is told by the
    tensor that has it."""
    first, second = (
        tensors(run / "checkpoints" / f"step_{COMPARED_STEP:06d}") for run in (one, other)
    )
    names = [name for name in first if name.startswith("model/")]
    apart = {name: (first[name] - second[name]).abs().max().item() for name in names}
    worst = max(apart, key=apart.__getitem__)
    return {
        "largest_difference": apart[worst],
        "of": worst.rpartition("/")[2],
        "largest_weight": max(first[name].abs().max().item() for name in names),
        "samples_part_in_step": parting_step(one, other),
    }


def parting_step(one: Path, other: Path) -> int | None:
    """The first step that the two did not train on the same samples. None: there is none."""
    first, second = by_step(one), by_step(other)
    common = first.keys() & second.keys()
    return min((step for step in common if first[step] != second[step]), default=None)


def by_step(run: Path) -> dict[int, set[tuple[Any, ...]]]:
    columns = ["sample_id", "completion", "finish_reason", "reward", "trained", "step"]
    found: dict[int, set[tuple[Any, ...]]] = {}
    for row in pyarrow.parquet.read_table(run / "samples", columns=columns).to_pylist():
        if row["trained"]:
            found.setdefault(row["step"], set()).add(tuple(row[name] for name in columns[:4]))
    return found


def grpo(folder: Path) -> dict[str, Any]:
    seeds = []
    for seed in SEEDS:
        runs = {
            layout: train(folder, f"grpo-{seed}-{layout.replace(' ', '-')}", layout, seed)
            for layout in LAYOUTS
        }
        rates = {layout: rates_of(run) for layout, run in runs.items()}
        found = {"seed": seed, **rates, "weights": compared(*runs.values())}
        seeds.append(found)
        print(json.dumps(found), flush=True)
    after = {name: statistics.fmean(one[name]["after"] for one in seeds) for name in LAYOUTS}
    apart = after["two stages"] - after["one process"]
    return {
        "seeds": seeds,
        "after": after,
        "after_apart": apart,
        "good": abs(apart) <= PASS_TOLERANCE and all(map(_near, seeds)),
    }


def other(folder: Path, name: str, steps: int, teacher: Path | None) -> dict[str, Any]:
    settings = [*OTHERS[name]]
    if name == "distillation":
        settings.append(f"model.teacher={teacher}")
    # Some more than are compared, since the last steps of a run empty its pool.
    lengths = {"one process": COMPARED_STEP + 5, "two stages": steps}
    one, staged = (
        train(
            *(folder, f"{name}-{layout.replace(' ', '-')}", layout, 0),
            *(f"train.steps={length}", f"eval.every_steps={length}", *settings),
        )
        for layout, length in lengths.items()
    )
    found = {"settings": settings, **rates_of(staged), "weights": compared(one, staged)}
    found["good"] = found["gain"] >= TARGET and _near(found)
    print(name, json.dumps(found), flush=True)
    return found


def _near(found: dict[str, Any]) -> bool:
    """Within the tolerance, or made of other samples by then."""
    weights = found["weights"]
    parted = weights["samples_part_in_step"]
    return weights["largest_difference"] <= WEIGHT_TOLERANCE or (
        parted is not None and parted <= COMPARED_STEP
    )


def main(
    only: Sequence[str] = NAMES, steps: int = 120, folder: Path | None = None
) -> dict[str, Any]:
    """`steps`: of the others in stages. Without all of `only` the kept result has the rest."""
    found = {} if len(only) == len(NAMES) else earlier(main, "arms")
    with tempfile.TemporaryDirectory() as temporary:
        place = folder or Path(temporary)
        taught = place / f"grpo-{SEEDS[0]}-two-stages" / "model"
        if "distillation" in only and "grpo" not in only and not taught.exists():
            raise SystemExit("distillation's teacher comes of grpo: name both")
        for name in only:
            found[name] = grpo(place) if name == "grpo" else other(place, name, steps, taught)
            if name == "distillation":
                found[name]["settings"][-1] = "model.teacher=GRPO's in stages, seed 0"
    return {"arms": found, "all_good": all(arm["good"] for arm in found.values())}


if __name__ == "__main__":
    bench(main, holds=lambda found: found["all_good"], only=NAMES)
