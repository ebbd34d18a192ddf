"""Where samples run, simulated: in turn, spread by work, or a prompt's together; and what lost
engines cost, with and without moves to those that take their place.

Two published workloads and one of them on two GPUs, as published and order-only, at a fixed degree
and without releases. The same prompts, lengths and losses in all arms of a seed; mean rollout of a
step over that in turn. The simulator gives no credit for a prefill that samples of one prompt
share, so that `group` is seen from its worse side alone.

    python benchmarks/engines_sim.py [--steps 20] [--seeds 3]
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from typing import Any

from lab import ROOT, bench

from rollpacker.core.commands import Move
from rollpacker.core.events import EngineLost
from rollpacker.core.records import Entry, Record
from rollpacker.sim.scenario import load_scenario
from rollpacker.sim.simulate import simulate

SCENARIOS: dict[str, tuple[tuple[str, ...], float]] = {
    "7b-8k": ((), 9e3),
    "14b-16k": ((), 16e3),
    "7b-8k on 2 GPUs": (("cluster.gpus=2", "rollout.prompts_per_step=16"), 1.2e3),
}
"""Changes of the file, and the mean life of an engine in seconds: short, to see something."""
SYSTEMS = ("rollpacker-published", "rollpacker")
FIXED = ("parallelism_planner.enabled=false", "stream_trainer.kinds=[]")
LOSSES = "unkind.engine_life_s"
ARMS: dict[str, tuple[str, ...]] = {
    "in turn": (),
    "spread": ("rollout.routing=spread",),
    "group": ("rollout.routing=group",),
    "spread, losses": ("rollout.routing=spread", "rollout.moves=false", LOSSES),
    "spread, losses, moves": ("rollout.routing=spread", "rollout.moves=true", LOSSES),
}


def simulated(scenario: str, overrides: tuple[str, ...], stage: str) -> tuple[float, Counter[type]]:
    """Mean seconds of a step, or of one of its stages; and how often each event came and each
    command was said (of moves, samples)."""
    made = load_scenario(ROOT / f"configs/scenarios/{scenario}.yaml", list(overrides))
    seen = Counter[type]()

    def count(entry: Entry) -> None:
        if isinstance(entry, Record):
            seen[type(entry.event)] += 1
            for command in entry.commands:
                seen[type(command)] += len(command.samples) if isinstance(command, Move) else 1

    result = simulate(made, observe=count)
    return statistics.mean(getattr(step, stage) for step in result.steps), seen


def rollout_s(scenario: str, overrides: tuple[str, ...]) -> tuple[float, int]:
    """Mean of a step, and how many engines were lost."""
    changes, life_s = SCENARIOS[scenario]
    given = [f"{LOSSES}={life_s:g}" if one == LOSSES else one for one in overrides]
    seconds, seen = simulated(scenario.split()[0], (*given, *changes), "rollout_s")
    return seconds, seen[EngineLost]


def main(steps: int = 20, seeds: int = 3) -> dict[str, Any]:
    rows = []
    for scenario, system in itertools.product(SCENARIOS, SYSTEMS):
        ratios: dict[str, list[float]] = {arm: [] for arm in ARMS}
        seconds, losses = [], []
        for seed in range(seeds):
            common = (*FIXED, f"system={system}", f"steps={steps}", f"seed={seed}")
            found = {arm: rollout_s(scenario, (*common, *own)) for arm, own in ARMS.items()}
            base_s = found["in turn"][0]
            seconds.append(base_s)
            losses.append(found["spread, losses"][1])
            for arm, (own_s, _) in found.items():
                ratios[arm].append(round(own_s / base_s, 4))
        row = {
            "scenario": scenario,
            "system": system,
            "in_turn_s": round(statistics.mean(seconds), 2),
            "losses": losses,
            "over_in_turn": ratios,
        }
        rows.append(row)
        print(row, flush=True)
    return {"steps": steps, "rows": rows}


if __name__ == "__main__":
    bench(main)
