"""Does the quickstart learn with vLLM as its engine, and as much as with the embedded one?

Every seed gets its own demonstrations and warm-up; from the same warmed-up weights one run trains
with vLLM and one with the embedded engine, everything else being configs/quickstart-vllm.yaml, but
that neither carries.
Held-out pass@1 is sampled at temperature 1 with four samples per prompt. The interval of the paired
difference is Student's.

    make vllm
    .venv-vllm/bin/python benchmarks/vllm_learning.py [--seeds 0 1 2]
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab import bench, write_result
from learning import STUDENT_95, rollpacker, warm_up

ENGINES = {"vllm": "vllm", "embedded": "torch"}
GAIN = 0.30
"""By so much pass@1 should rise on every seed."""


def train(seed: int, model: Path, folder: Path, arm: str) -> dict[str, float]:
    """One run: pass@1 before and after, and where its seconds went."""
    rollpacker(
        *("train", "configs/quickstart-vllm.yaml", f"seed={seed}", f"name={arm}-{seed}"),
        *(f"runs_dir={folder}", f"model.path={model}", "save_samples=false"),
        *("eval.samples_per_prompt=4", f"rollout.engine.name={ENGINES[arm]}"),
        "tail_batching.carry=none",
    )
    lines = (folder / f"{arm}-{seed}" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    passed = [row["eval/pass@1"] for row in rows if "eval/pass@1" in row]
    steps = [row for row in rows if "response_length/max" in row]
    return {
        "before": passed[0],
        "after": passed[-1],
        "seconds": sum(row["timing_s/step"] for row in steps),
        "rollout_s": sum(row["timing_s/gen"] for row in steps),
    }


def main(seeds: Sequence[int] = (0, 1, 2)) -> None:
    seeds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for seed in seeds:
            model = warm_up(seed, folder, "configs/quickstart-vllm-warmup.yaml")
            arms = tuple(ENGINES) if seed % 2 else tuple(ENGINES)[::-1]
            found = {arm: train(seed, model, folder, arm) for arm in arms}
            seeds.append({"seed": seed, **found})
            print(json.dumps(seeds[-1]), flush=True)
    gains = [one["vllm"]["after"] - one["vllm"]["before"] for one in seeds]
    differences = [one["vllm"]["after"] - one["embedded"]["after"] for one in seeds]
    result: dict[str, Any] = {
        "seeds": seeds,
        "gains": gains,
        "asked": GAIN,
        "all_learn": min(gains) >= GAIN,
        "vllm_minus_embedded": statistics.mean(differences),
    }
    if len(seeds) > 1:
        spread = statistics.stdev(differences) / math.sqrt(len(seeds))
        result["half_interval_95"] = STUDENT_95[len(seeds) - 1] * spread
    print(json.dumps(result, indent=1))
    print(write_result("vllm_learning", result))


if __name__ == "__main__":
    bench(main)
