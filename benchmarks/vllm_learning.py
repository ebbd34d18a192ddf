"""Does the quickstart learn with vLLM as its engine, and as much as with the embedded one?

From each seed's own warmed-up weights one run trains with vLLM and one with the embedded engine,
with configs/quickstart-vllm.yaml, but that neither carries. Held-out pass@1 is sampled at
temperature 1 with four samples per prompt.

    .venv-vllm/bin/python benchmarks/vllm_learning.py [--seeds 0 1 2]
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab import bench, metrics, paired_interval, pass_rates, rollpacker
from learning import warm_up

ENGINES = {"vllm": "vllm", "embedded": "torch"}
GAIN = 0.30
"""The least rise of pass@1 on every seed."""


def train(seed: int, model: Path, folder: Path, arm: str) -> dict[str, float]:
    """One run: pass@1 before and after, and where its seconds went."""
    rollpacker(
        *("train", "configs/quickstart-vllm.yaml", f"seed={seed}", f"name={arm}-{seed}"),
        *(f"runs_dir={folder}", f"model.path={model}", "save_samples=false"),
        *("eval.samples_per_prompt=4", f"rollout.engine.name={ENGINES[arm]}"),
        "tail_batching.carry=none",
    )
    passed = pass_rates(folder / f"{arm}-{seed}")
    steps = [row for row in metrics(folder / f"{arm}-{seed}") if "response_length/max" in row]
    return {
        "before": passed[0],
        "after": passed[-1],
        "seconds": sum(row["timing_s/step"] for row in steps),
        "rollout_s": sum(row["timing_s/gen"] for row in steps),
    }


def main(seeds: Sequence[int] = (0, 1, 2)) -> dict[str, Any]:
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for seed in seeds:
            model = warm_up(seed, folder, "configs/quickstart-vllm-warmup.yaml")
            arms = tuple(ENGINES) if seed % 2 else tuple(ENGINES)[::-1]
            found.append({"seed": seed, **{arm: train(seed, model, folder, arm) for arm in arms}})
            print(json.dumps(found[-1]), flush=True)
    gains = [one["vllm"]["after"] - one["vllm"]["before"] for one in found]
    differences = [one["vllm"]["after"] - one["embedded"]["after"] for one in found]
    mean, low, _ = paired_interval(differences)
    interval = {"half_interval_95": mean - low} if len(found) > 1 else {}
    learned = {"gains": gains, "asked": GAIN, "all_learn": min(gains) >= GAIN}
    return {"seeds": found, **learned, "vllm_minus_embedded": mean, **interval}


if __name__ == "__main__":
    bench(main, holds=lambda found: found["all_learn"])
