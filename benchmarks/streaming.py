"""Does streaming pay? A trainer in a process of its own, with and without `stream_trainer`.

The quickstart's model, prompts and reward; its lengths have a long tail. One process generates,
one trains, one torch thread each. Both arms train the same samples from the same weights, so that
their weights must be equal after ten steps but for rounding; they take turns, several times.
`plain` waits for every response of a round, `tail` is tail batching with the quickstart's
factors, `plain_64` has 64 prompts a step instead of 16.

    python benchmarks/streaming.py [--repeats 3] [--steps 40] [--only plain_64]
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab import bench, earlier, metrics, rollpacker, turns
from safetensors.torch import load_file

CHECKED_STEPS = 10
"""After so many steps the weights of both arms are compared."""
BOUND = 1e-5
KINDS = {
    "plain": ["tail_batching.enabled=false"],
    "tail": [],
    "plain_64": ["tail_batching.enabled=false", "rollout.prompts_per_step=64"],
}
SKIPPED_STEPS = 5
"""Not timed: the first ones of a process are slower."""


def train(name: str, steps: int, folder: Path, *settings: str) -> tuple[Path, list[dict[str, Any]]]:
    """One run: its folder, and its rows of metrics."""
    rollpacker(
        *("train", "configs/quickstart.yaml"),
        *(f"name={name}", f"runs_dir={folder}", f"train.steps={steps}", "train.processes=1"),
        *("eval.every_steps=100000", "eval.max_prompts=8", "save_samples=false"),
        *(f"checkpoint.every_steps={CHECKED_STEPS}", "checkpoint.keep_last=100"),
        *settings,
    )
    return folder / name, [row for row in metrics(folder / name) if "timing_s/step" in row]


def step_s(rows: list[dict[str, Any]]) -> list[float]:
    """Seconds of each step, without checkpoints and evaluations."""
    return [
        row["timing_s/step"]
        - row.get("timing_s/save_checkpoint", 0.0)
        - row.get("timing_s/testing", 0.0)
        for row in rows[SKIPPED_STEPS:]
    ]


def differences(one: Path, other: Path) -> dict[str, float]:
    """Between the weights of two runs after the same number of steps."""
    weights = []
    for run in (one, other):
        path = run / "checkpoints" / f"step_{CHECKED_STEPS:06d}" / "model" / "model.safetensors"
        weights.append(load_file(path))
    apart = [(weights[0][name] - value).abs() for name, value in weights[1].items()]
    return {
        "largest": max(values.max().item() for values in apart),
        "elements_beyond": sum((values > BOUND).sum().item() for values in apart),
        "elements": sum(values.numel() for values in apart),
    }


def same_weights(kind: str, settings: list[str], folder: Path) -> dict[str, float]:
    """One pair of short runs with an epsilon of 1e-6 in Adam. With its 1e-8, rounding alone moves
    elements whose gradient is nearly zero: Adam divides by their size."""
    runs = []
    for arm in ("false", "true"):
        name = f"{kind}-check-{arm}"
        extra = (f"stream_trainer.enabled={arm}", "train.eps=1.0e-6", *settings)
        runs.append(train(name, CHECKED_STEPS, folder, *extra)[0])
    return differences(*runs)


def measure(
    kind: str, settings: list[str], num_turns: int, steps: int, folder: Path
) -> dict[str, Any]:
    arms: dict[str, list[float]] = {"waiting": [], "streaming": []}
    apart, fired, ratios = [], [], []
    runs = {}
    for turn, arm in turns(arms, num_turns):
        on = str(arm == "streaming").lower()
        name = f"{kind}-{arm}-{turn}"
        runs[arm], rows = train(name, steps, folder, f"stream_trainer.enabled={on}", *settings)
        arms[arm].append(statistics.fmean(step_s(rows)))
        if arm == "streaming":
            fired.append(statistics.fmean(row["perf/samples_streamed"] > 0 for row in rows))
        if len(runs) == 2:
            apart.append(differences(runs.pop("waiting"), runs.pop("streaming")))
            ratios.append(arms["waiting"][-1] / arms["streaming"][-1])
            print(f"{kind} turn {turn}: {ratios[-1]:.3f}x, {apart[-1]}", flush=True)
    return {
        "steps": steps,
        "step_s": arms,
        "speed_up": ratios,
        "speed_up_mean": statistics.fmean(ratios),
        "steps_that_streamed": statistics.fmean(fired),
        "weights": apart,
        "weights_with_eps_1e-6": same_weights(kind, settings, folder),
    }


def main(repeats: int = 3, steps: int = 40, only: Sequence[str] | None = None) -> dict[str, Any]:
    found = earlier(main, "kinds") if only else {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in only or KINDS:
            found[kind] = measure(kind, KINDS[kind], repeats, steps, Path(folder))
    return {"checked_after": CHECKED_STEPS, "kinds": found}


if __name__ == "__main__":
    bench(main, only=KINDS)
