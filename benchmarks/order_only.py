"""Is it the same responses that are trained on, with tail batching and without? On a frozen policy.

The real engine, the real core (`Job`) and what carries tokens in a run work off the prompts of the
quickstart and of code-tiny, under several seeds, at several factors, with a queue and with a pool.
Every response that would be trained on is compared, token for token, with that of a run that waits
for all; so are the numbers of responses.

    python benchmarks/order_only.py [--rounds 40] [--seeds 0 1 2]
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from lab import ROOT, bench
from tail_batching import SYNC, Arm
from workload import load_workload

from rollpacker.config.schema import RunConfig
from rollpacker.core.rounds.tail_batching import Stragglers, TailBatchingConfig
from rollpacker.run.parts.policy import load_policy

CONFIGS = ("quickstart", "code-tiny")
FACTORS = (1.25, 1.5, 2.0)
STRAGGLERS: tuple[Stragglers, ...] = ("queue", "pool")


def compare(config: RunConfig, seeds: list[int], num_rounds: int) -> list[dict[str, Any]]:
    """Every setting against waiting for all, under every seed."""
    rows = []
    for seed in seeds:
        seeded = dataclasses.replace(config, seed=seed)
        policy = load_policy(seeded, threads=config.train.threads)
        wanted = _run(Arm(policy, seeded, "off", SYNC, num_rounds))
        for factor, stragglers in itertools.product(FACTORS, STRAGGLERS):
            tail = TailBatchingConfig(
                prompt_factor=factor, stragglers=stragglers, flush_each_epoch=False
            )
            arm = _run(Arm(policy, seeded, f"{stragglers} {factor:g}", tail, num_rounds))
            trained = {key: arm.trained.get(key) for key in wanted.trained}
            row = {
                "config": config.name,
                "seed": seed,
                "arm": arm.name,
                "responses": len(wanted.trained),
                "equal": sum(trained[key] == tokens for key, tokens in wanted.trained.items()),
                "deferred_responses": arm.num_carried,
            }
            rows.append(row)
            print(row, flush=True)
        asyncio.run(policy.engine.close())
    return rows


def _run(arm: Arm) -> Arm:
    while not arm.finished:
        arm.run_round()
    return arm


def main(rounds: int = 40, seeds: Sequence[int] = (0, 1, 2)) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for name in CONFIGS:
        rows += compare(load_workload(ROOT / "configs" / f"{name}.yaml"), seeds, rounds)
    return {"rounds": rounds, "rows": rows}


if __name__ == "__main__":
    bench(main, holds=lambda found: all(r["equal"] == r["responses"] for r in found["rows"]))
