"""What deferred trajectories save by what they carry: whole runs with tail batching, with and
without.

    python benchmarks/carried_turns.py [--seeds 3] [--steps 6]

A small model of random weights talks with an environment that answers at once, for two to eight
turns. It is trained with a small learning rate and with one that moves it far between rounds; arms
take turns. Counted are tokens that engines drew one after another (those that were carried and kept
are read in one pass), the engine's decode steps, and seconds of rollouts, each for one trained
prompt, without carrying over with it.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lab import bench, metrics, turns

from rollpacker.cli.main import main as rollpacker
from rollpacker.engines.embedded.engine import TorchEngine
from tests.run.test_turns import save_model

TALK = """
class Talk:
    deterministic = True

    def reset(self, row):
        self.left = 2 + row["seed"] % 7
        return [{"role": "user", "content": f"Question {row['number']}."}]

    def step(self, message):
        self.left -= 1
        length = len(message["content"])
        asked = [{"role": "user", "content": f"{length} letters. And then?"}]
        return asked, length % 4 / 4, not self.left
"""
RATES = {"small": 1e-6, "large": 1e-3}
MEASURES = ("drawn_tokens", "decode_steps", "rollout_s")


SIZES = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}
"""Sizes of the model, larger than in tests, so that decoding takes its time."""


def write_run(steps: int) -> None:
    """Into the working folder."""
    Path("talk.py").write_text(TALK)
    rows = [{"prompt": f"Row {n}", "number": n} for n in range(8 * steps + 8)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "model": {"path": "model"},
        "data": {"train": {"kind": "jsonl", "path": "rows.jsonl"}, "max_prompt_tokens": 64},
        "environment": {"function": "talk.py:Talk", "max_turns": 8},
        "rollout": {
            "prompts_per_step": 8,
            "samples_per_prompt": 4,
            "max_response_tokens": 48,
            "stop": ["a", "e", "i"],
        },
        "rewards": [{"function": "environment"}],
        "train": {"steps": steps},
    }
    Path("run.yaml").write_text(json.dumps(config))


def run(name: str, *overrides: str) -> dict[str, float]:
    """One run's counts, for one trained prompt."""
    steps = []
    close = TorchEngine.close

    async def counted(self: TorchEngine) -> None:
        steps.append(self.status().decode_steps)
        await close(self)

    with (
        patch.object(TorchEngine, "close", counted),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        assert rollpacker(["train", "run.yaml", f"name={name}", *overrides]) == 0
    folder = Path("runs") / name
    log = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    rows = metrics(folder)
    ends = [one for one in log if one.get("event") in ("SampleGenerated", "SampleAborted")]
    commands = [command for one in log for command in one.get("commands", ())]
    trained = sum(len(one["groups"]) for one in commands if one["command"] == "TrainOn")
    return {
        "drawn_tokens": sum(e["num_tokens"] - (e.get("num_kept") or 0) for e in ends) / trained,
        "decode_steps": sum(steps) / trained,
        "rollout_s": sum(row.get("timing_s/gen", 0.0) for row in rows) / trained,
        "carried_tokens": sum(row.get("carry/tokens") or 0 for row in rows) / trained,
        "kept_tokens": sum(row.get("carry/tokens_kept") or 0 for row in rows) / trained,
    }


def main(seeds: int = 3, steps: int = 6) -> dict[str, Any]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        save_model("model", max_positions=1024, **SIZES)
        write_run(steps)
        rows = [
            compared(stragglers, rate, seeds)
            for stragglers, rate in itertools.product(("queue", "pool"), RATES)
        ]
    return {"seeds": seeds, "steps": steps, "load": os.getloadavg()[0], "rows": rows}


def compared(stragglers: str, rate: str, seeds: int) -> dict[str, Any]:
    """Runs with carrying and without, seed by seed."""
    arms: dict[str, list[dict[str, float]]] = {"none": [], "exact": []}
    for seed, carry in turns(arms, seeds):
        found = run(
            f"{stragglers}-{rate}-{carry}-{seed}",
            f"seed={seed}",
            f"train.learning_rate={RATES[rate]}",
            f"tail_batching={{stragglers: {stragglers}, carry: {carry}}}",
        )
        arms[carry].append(found)
    pairs = list(zip(arms["none"], arms["exact"], strict=True))
    ratios = {name: [none[name] / exact[name] for none, exact in pairs] for name in MEASURES}
    carried = sum(one["carried_tokens"] for one in arms["exact"])
    row = {
        "stragglers": stragglers,
        "learning_rate": RATES[rate],
        "none_over_exact": {k: statistics.median(v) for k, v in ratios.items()},
        "all_seeds": ratios,
        "kept_of_carried": sum(one["kept_tokens"] for one in arms["exact"]) / carried,
        "arms": arms,
    }
    print(stragglers, rate, row["none_over_exact"], row["kept_of_carried"], flush=True)
    return row


if __name__ == "__main__":
    bench(main)
