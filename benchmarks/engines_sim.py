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
from collections import Counter

from machine import ROOT, write_result

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


def arguments(about: str) -> argparse.Namespace:
    """`steps` and `seeds`."""
    parser = argparse.ArgumentParser(description=about.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    return parser.parse_args()


def main() -> int:
    args = arguments(__doc__)
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
