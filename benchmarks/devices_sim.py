"""Devices that change sides, simulated: what a release is worth where its samples are dealt out in
turn, and where they go to the engines with the least work; and what engines of another degree cost
by the seconds that they need to come.

Two published workloads, of which one changes its degree. The same prompts and lengths in all arms
of a seed; mean step over that without a release, or with engines that are there at once.

    python benchmarks/devices_sim.py [--steps 20] [--seeds 3]
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from engines_sim import simulated
from lab import bench

from rollpacker.core.commands import Move, Release, Resize

SPREAD = "rollout.routing=spread"
FIXED = ("parallelism_planner.enabled=false",)
KINDS = 'stream_trainer.kinds=["long","flush"]'
NONE = "stream_trainer.kinds=[]"
PLANNED = ("parallelism_planner.enabled=true", NONE)
ARMS: dict[str, tuple[str, ...]] = {
    "no release": (*FIXED, NONE),
    "release, in turn": (*FIXED, KINDS),
    "release, spread": (*FIXED, KINDS, SPREAD),
    "degrees, at once": (*PLANNED, SPREAD),
    "degrees, 10 s": (*PLANNED, SPREAD, "parallelism_planner.resize_s=10"),
    "degrees, 60 s": (*PLANNED, SPREAD, "parallelism_planner.resize_s=60"),
}
SCENARIOS = {"7b-8k": tuple(ARMS)[:3], "14b-16k": tuple(ARMS)}
BASES = dict.fromkeys(ARMS, "no release") | {
    arm: "degrees, at once" for arm in ARMS if arm.startswith("degrees")
}


def main(steps: int = 20, seeds: int = 3) -> dict[str, Any]:
    rows = []
    for scenario, arms in SCENARIOS.items():
        ratios: dict[str, list[float]] = {arm: [] for arm in arms}
        said = {arm: Counter[type]() for arm in arms}
        for seed in range(seeds):
            common = ("system=rollpacker-published", f"steps={steps}", f"seed={seed}")
            seconds = {}
            for arm in arms:
                seconds[arm], counts = simulated(scenario, (*common, *ARMS[arm]), "total_s")
                said[arm] += counts
                ratios[arm].append(round(seconds[arm] / seconds[BASES[arm]], 4))
        rows += [
            {
                "scenario": scenario,
                "arm": arm,
                "over": BASES[arm],
                "ratios": ratios[arm],
                "releases": said[arm][Release],
                "moved_samples": said[arm][Move],
                "resizes": said[arm][Resize],
            }
            for arm in arms
        ]
    return {"steps": steps, "rows": rows}


if __name__ == "__main__":
    bench(main)
