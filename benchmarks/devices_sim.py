"""Devices that change sides, simulated: what a release is worth where the core's fleet moves its
samples, beside the same where the simulator deals them out in turn; and what engines of another
degree cost by the seconds that they need to come.

Two published workloads, of which one changes its degree. The same prompts and lengths in all arms
of a seed; mean step over that without a release, or with engines that are there at once.

    python benchmarks/devices_sim.py [--steps 20] [--seeds 3]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter

from machine import ROOT, write_result

from rollpacker.core.commands import Move, Release, Resize
from rollpacker.core.records import Entry, Record
from rollpacker.sim.scenario import load_scenario
from rollpacker.sim.simulate import simulate

FLEET = ("rollout.routing=spread", "rollout.moves=true")
FIXED = ("parallelism_planner.enabled=false",)
KINDS = 'stream_trainer.kinds=["long","flush"]'
NONE = "stream_trainer.kinds=[]"
PLANNED = ("parallelism_planner.enabled=true", NONE)
ARMS: dict[str, tuple[str, ...]] = {
    "no release": (*FIXED, NONE),
    "release, in turn": (*FIXED, KINDS),
    "release, moves": (*FIXED, KINDS, *FLEET),
    "degrees, at once": (*PLANNED, *FLEET),
    "degrees, 10 s": (*PLANNED, *FLEET, "parallelism_planner.resize_s=10"),
    "degrees, 60 s": (*PLANNED, *FLEET, "parallelism_planner.resize_s=60"),
}
SCENARIOS = {"7b-8k": tuple(ARMS)[:3], "14b-16k": tuple(ARMS)}
BASES = dict.fromkeys(ARMS, "no release") | {
    arm: "degrees, at once" for arm in ARMS if arm.startswith("degrees")
}


def step_s(scenario: str, overrides: tuple[str, ...]) -> tuple[float, Counter[type]]:
    """Mean of a step, and how often each command was said; of moves, samples."""
    made = load_scenario(ROOT / f"configs/scenarios/{scenario}.yaml", list(overrides))
    said: Counter[type] = Counter()

    def count(entry: Entry) -> None:
        for command in entry.commands if isinstance(entry, Record) else ():
            said[type(command)] += len(command.samples) if isinstance(command, Move) else 1

    result = simulate(made, observe=count)
    return statistics.mean(step.total_s for step in result.steps), said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    rows = []
    for scenario, arms in SCENARIOS.items():
        ratios: dict[str, list[float]] = {arm: [] for arm in arms}
        said = {arm: Counter[type]() for arm in arms}
        for seed in range(args.seeds):
            common = ("system=rollpacker-published", f"steps={args.steps}", f"seed={seed}")
            seconds = {}
            for arm in arms:
                seconds[arm], counts = step_s(scenario, (*common, *ARMS[arm]))
                said[arm] += counts
                ratios[arm].append(seconds[arm] / seconds[BASES[arm]])
        for arm in arms:
            counts = said[arm]
            row = {
                "scenario": scenario,
                "arm": arm,
                "over": BASES[arm],
                "ratios": [round(ratio, 4) for ratio in ratios[arm]],
                "releases": counts[Release],
                "moved_samples": counts[Move],
                "resizes": counts[Resize],
            }
            rows.append(row)
            mean = statistics.mean(ratios[arm])
            print(
                f"{scenario}, {arm}: {mean:.3f} of {BASES[arm]}; {counts[Release]} releases, "
                f"{counts[Move]} samples moved, {counts[Resize]} changes of degree",
                flush=True,
            )
    write_result("devices_sim", {"steps": args.steps, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
