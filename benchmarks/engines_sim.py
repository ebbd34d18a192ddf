"""Where samples run, simulated: in turn, spread by work, or a prompt's together; and what lost
engines cost, with and without moves to those that take their place.

Two published workloads and one of them on two GPUs, as published and order-only, at a fixed degree
and without releases. The same prompts, lengths and losses in all arms of a seed; mean rollout of a
step over that in turn. The simulator gives no credit for a prefill that samples of one prompt
share, so that `group` is seen from its worse side alone.

    python benchmarks/engines_sim.py [--steps 20] [--seeds 3]
"""

from __future__ import annotations

import argparse
import statistics
import sys

from machine import ROOT, write_result

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
    "spread, losses": ("rollout.routing=spread", LOSSES),
    "spread, losses, moves": ("rollout.routing=spread", "rollout.moves=true", LOSSES),
}


def rollout_s(scenario: str, overrides: tuple[str, ...]) -> tuple[float, int]:
    """Mean of a step, and how many engines were lost."""
    file = ROOT / f"configs/scenarios/{scenario.split()[0]}.yaml"
    changes, life_s = SCENARIOS[scenario]
    given = [f"{LOSSES}={life_s:g}" if one == LOSSES else one for one in overrides]
    made = load_scenario(file, [*given, *changes])
    num_losses = 0

    def count(entry: Entry) -> None:
        nonlocal num_losses
        num_losses += isinstance(entry, Record) and isinstance(entry.event, EngineLost)

    result = simulate(made, observe=count)
    return statistics.mean(step.rollout_s for step in result.steps), num_losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    rows = []
    for scenario in SCENARIOS:
        for system in SYSTEMS:
            ratios: dict[str, list[float]] = {arm: [] for arm in ARMS}
            seconds = []
            losses = []
            for seed in range(args.seeds):
                common = (*FIXED, f"system={system}", f"steps={args.steps}", f"seed={seed}")
                found = {arm: rollout_s(scenario, (*common, *own)) for arm, own in ARMS.items()}
                base_s = found["in turn"][0]
                seconds.append(base_s)
                losses.append(found["spread, losses"][1])
                for arm, (own_s, _) in found.items():
                    ratios[arm].append(own_s / base_s)
            row = {
                "scenario": scenario,
                "system": system,
                "in_turn_s": round(statistics.mean(seconds), 2),
                "losses": losses,
                "over_in_turn": {arm: [round(r, 4) for r in rs] for arm, rs in ratios.items()},
            }
            rows.append(row)
            means = ", ".join(f"{arm} {statistics.mean(rs):.3f}" for arm, rs in ratios.items())
            base = f"{row['in_turn_s']:.1f} s in turn, {sum(losses)} engines lost"
            print(f"{scenario}, {system}: {base}; {means}", flush=True)
    write_result("engines_sim", {"steps": args.steps, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
