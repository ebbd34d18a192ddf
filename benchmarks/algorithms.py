"""Does each algorithm learn? Held-out pass@1 of the quickstart, before and after.

One run per algorithm from the same warmed-up weights, on the same prompts: that of
configs/quickstart.yaml with `algorithm.name` set and the settings below, and nothing else. The
teacher of distillation is what GRPO has made of the model in the first run. PPO also reports which
share of the returns' variance its critic explains, before it has seen them.

    python benchmarks/algorithms.py [--only ppo gspo] [--steps 100]
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab import bench, earlier, metrics, pass_rates, rollpacker

from rollpacker.algo import ALGORITHMS
from rollpacker.run.folder.checkpoint import newest_checkpoint

TARGET = 0.15
SETTINGS: dict[str, list[str]] = {
    "grpo": [],
    "dr_grpo": [],
    "dapo": ["rollout.dynamic_sampling.enabled=true", "algorithm.overlong_buffer_tokens=96"],
    "gspo": [],
    "cispo": [],
    "rloo": [],
    "reinforce_pp": ["algorithm.kl_coef=0.001"],
    "reinforce_pp_baseline": ["algorithm.kl_coef=0.001"],
    "ppo": ["train.critic.learning_rate=2e-3", "algorithm.gae_lambda=1.0"],
    "distillation": [],
}
LAST_STEPS = 20
"""Over so many last steps the critic's share is averaged."""


def train(name: str, steps: int, folder: Path, teacher: Path | None) -> dict[str, Any]:
    settings = list(SETTINGS[name])
    if name == "distillation":
        assert teacher is not None
        settings.append(f"model.teacher={teacher}")
    rollpacker(
        *("train", "configs/quickstart.yaml"),
        *(f"name={name}", f"runs_dir={folder}", f"algorithm.name={name}", f"train.steps={steps}"),
        # The row's own: the quickstart's config sets another.
        "algorithm.loss_aggregation=null",
        *("eval.samples_per_prompt=4", f"eval.every_steps={steps}", "save_samples=false"),
        *settings,
    )
    before, *_, after = pass_rates(folder / name)
    result: dict[str, Any] = {"settings": settings, "before": before, "after": after}
    result["gain"] = after - before
    key = "critic/explained_variance"
    if explained := [row[key] for row in metrics(folder / name) if key in row]:
        result["explained_variance_last_steps"] = statistics.fmean(explained[-LAST_STEPS:])
        result["explained_variance"] = explained
    return result


def main(steps: int = 100, only: Sequence[str] | None = None) -> dict[str, Any]:
    found = earlier(main, "algorithms") if only else {}
    names = {*(only or ALGORITHMS)}
    if "distillation" in names:
        names.add("grpo")
    teacher = None
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in (one for one in ALGORITHMS if one in names):
            found[name] = train(name, steps, folder, teacher)
            print(f"{name:22} {found[name]['before']:.3f} -> {found[name]['after']:.3f}")
            if name == "grpo":
                teacher = newest_checkpoint(folder / "grpo" / "checkpoints").folder / "model"
    missed = sorted(name for name, row in found.items() if row["gain"] < TARGET)
    return {"steps": steps, "target": TARGET, "missed": missed, "algorithms": found}


if __name__ == "__main__":
    bench(main, only=ALGORITHMS)
