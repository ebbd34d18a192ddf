"""Debias in real training: do the weighted samples have the lengths of a run without tail batching?

The quickstart from the same warmed-up weights, with several seeds and three arms: without tail
batching (its trained lengths are the policy's own), with it, and with it and
`tail_batching.debias=moments`. Compared are mean trained lengths, weighted by the loss weights,
over the steps after the first quarter (weights need a window of data). Exit code 1 if the weighted
mean is off by more than 5 % and by more than the 95 % interval of the seeds' ratios.

    python benchmarks/debias_run.py [--seeds 0 1 2]     # about 5 minutes a seed on two cores
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from learning import STUDENT_95, rollpacker, warm_up
from machine import write_result

from rollpacker.core.commands import TrainOn
from rollpacker.core.events import SampleGenerated
from rollpacker.core.ids import SampleId
from rollpacker.core.records import Record
from rollpacker.report.log import EventLog, events_path

ARMS: dict[str, tuple[str, ...]] = {
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
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    curve = {row["step"]: row["eval/pass@1"] for row in rows if "eval/pass@1" in row}
    return {
        "trained_mean": statistics.mean(length for length, _ in later),
        "weighted_mean": sum(length * w for length, w in later) / weight,
        "effective_sample_size": weight**2 / (len(later) * sum(w * w for _, w in later)),
        "steps": len(steps),
        "pass_at_1_after": curve[max(curve)],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    results: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for seed in args.seeds:
            model = warm_up(seed, folder)
            results[seed] = {}
            for arm, overrides in ARMS.items():
                rollpacker(
                    "train",
                    "configs/quickstart.yaml",
                    f"seed={seed}",
                    f"name={arm}-{seed}",
                    f"runs_dir={folder}",
                    f"model.path={model}",
                    f"train.steps={args.steps}",
                    "save_samples=false",
                    *overrides,
                )
                results[seed][arm] = measure(folder / f"{arm}-{seed}")
                print(seed, arm, json.dumps(results[seed][arm]), flush=True)
    ratios = {
        arm: [r[arm]["weighted_mean"] / r["off"]["trained_mean"] for r in results.values()]
        for arm in ("none", "moments")
    }
    summary = {}
    for arm, values in ratios.items():
        mean = statistics.mean(values)
        half = math.inf
        if len(values) > 1:
            half = STUDENT_95[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
        summary[arm] = {"mean": mean, "half_width": half}
        print(f"{arm:<8} weighted trained length over off: {mean:.3f} +- {half:.3f}")
    payload = {"results": results, "ratios": ratios, "summary": summary}
    write_result("debias_run", payload)
    off_by = abs(summary["moments"]["mean"] - 1)
    if off_by > max(BOUND, summary["moments"]["half_width"]):
        print(f"missed: weighted lengths are off by {off_by:.1%}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
