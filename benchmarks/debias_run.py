"""Debias in real training: are the weighted samples as long as those of a run without racing?

The quickstart from the same warmed-up weights, several seeds. *Frozen* (a learning rate of nearly
nothing): trained lengths without tail batching are the truth for the weighted ones. *Learning*: as
shipped; every arm ends with another policy, so lengths differ for that reason too. Compared are
mean lengths by loss weights, after the first quarter of steps. Exit code 1 if the frozen runs' is
off by more than 5 % and by more than the 95 % interval of the seeds' ratios.

    python benchmarks/debias_run.py [--seeds 0 1 2] [--jobs 2] [--frozen-only]
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lab import bench, paired_interval, pass_rates, rollpacker
from learning import warm_up

from rollpacker.core.commands import TrainOn
from rollpacker.core.events import SampleGenerated
from rollpacker.core.ids import SampleId
from rollpacker.core.records import Record
from rollpacker.report.log import EventLog, events_path

FROZEN = "train.learning_rate=1e-12"
ARMS: dict[str, tuple[str, ...]] = {
    "frozen off": (FROZEN, "tail_batching.enabled=false"),
    "frozen none": (FROZEN,),
    "frozen moments": (FROZEN, "tail_batching.debias=moments"),
    "off": ("tail_batching.enabled=false",),
    "none": (),
    "moments": ("tail_batching.debias=moments",),
}
BOUND = 0.05


def trained_lengths(run: Path) -> list[list[tuple[int, float]]]:
    """(tokens, weight) of every trained sample, step by step."""
    steps: list[list[tuple[int, float]]] = []
    lengths: dict[SampleId, int] = {}
    for entry in EventLog(events_path(run)):
        if not isinstance(entry, Record):
            continue
        if isinstance(entry.event, SampleGenerated):
            lengths[entry.event.sample] = entry.event.num_tokens
        for command in entry.commands:
            if isinstance(command, TrainOn):
                weights = command.weights or [[1.0] * len(group) for group in command.groups]
                steps.append(
                    [
                        (lengths[sample], weight)
                        for group, own in zip(command.groups, weights, strict=True)
                        for sample, weight in zip(group, own, strict=True)
                    ]
                )
                lengths.clear()
    return steps


def measure(run: Path) -> dict[str, Any]:
    steps = trained_lengths(run)
    later = [pair for step in steps[len(steps) // 4 :] for pair in step]
    weight = sum(w for _, w in later)
    return {
        "trained_mean": statistics.mean(length for length, _ in later),
        "weighted_mean": sum(length * w for length, w in later) / weight,
        "effective_sample_size": weight**2 / (len(later) * sum(w * w for _, w in later)),
        "steps": len(steps),
        "pass_at_1_after": pass_rates(run)[-1],
    }


def train(seed: int, arm: str, model: Path, folder: Path, steps: int) -> dict[str, Any]:
    name = f"{arm.replace(' ', '-')}-{seed}"
    rollpacker(
        *("train", "configs/quickstart.yaml", f"seed={seed}", f"name={name}"),
        *(f"runs_dir={folder}", f"model.path={model}", f"train.steps={steps}"),
        *("save_samples=false", *ARMS[arm]),
    )
    result = measure(folder / name)
    print(seed, arm, json.dumps(result), flush=True)
    return result


def main(
    seeds: Sequence[int] = (0, 1, 2), steps: int = 200, jobs: int = 2, frozen_only: bool = False
) -> dict[str, Any]:
    arms = [arm for arm in ARMS if arm.startswith("frozen") or not frozen_only]
    works = [(seed, arm) for arm in arms for seed in seeds]
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(jobs) as pool:
        folder = Path(temporary)
        models = dict(zip(seeds, pool.map(lambda s: warm_up(s, folder), seeds), strict=True))
        found = pool.map(lambda work: train(*work, models[work[0]], folder, steps), works)
        results = dict(zip(works, found, strict=True))
    summary = {}
    for arm in arms:
        truth = "frozen off" if arm.startswith("frozen") else "off"
        if arm == truth:
            continue
        values = [
            results[seed, arm]["weighted_mean"] / results[seed, truth]["trained_mean"]
            for seed in seeds
        ]
        mean, low, _ = paired_interval(values)
        half = mean - low if len(values) > 1 else math.inf
        summary[arm] = {"mean": mean, "half_width": half, "ratios": values}
    plain = {f"{arm}, seed {seed}": result for (seed, arm), result in results.items()}
    return {"results": plain, "summary": summary}


def holds(found: dict[str, Any]) -> bool:
    """Whether the frozen runs' weighted lengths are as long as they should be."""
    checked = found["summary"]["frozen moments"]
    return bool(abs(checked["mean"] - 1) <= max(BOUND, checked["half_width"]))


if __name__ == "__main__":
    bench(main, holds=holds)
