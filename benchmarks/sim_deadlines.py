"""Adaptive deadlines of checks in the simulator, against Fig. 13c of the RollPacker paper.

7B, 8k tokens, code alone, the set-up and constants as shipped; the same
`core/checks/reward_schedule.py` that real runs use. Seconds of rollout and rewards per round, with
a fixed 30 s limit and with the adaptive one. Programs that were cut off at the token limit are not
run: they have no end.

    python benchmarks/sim_deadlines.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lab import ROOT, bench

from rollpacker.sim.result import StepResult
from rollpacker.sim.scenario import load_scenario
from rollpacker.sim.simulate import simulate

STEPS, SEEDS = 40, (0, 1, 2)
CODE = (
    "rewards=[{kind: code, share: 1.0, check_truncated: false, lengths: {preset: rollpacker-code}}]"
)
BASE = (CODE, "system=rollpacker-published", "stream_trainer.enabled=false")
RACES = {
    "race on scored, as the published code": (),
    "race on generated, checks cancelled and longest first, as real runs here": (
        "tail_batching.race=generated",
        "reward_scheduler.cancel=true",
        "reward_scheduler.order=longest",
    ),
}
PUBLISHED = {("short", False): 55.9, ("short", True): 31.8, ("long", False): 79.7}
PUBLISHED["long", True] = 82.0
"""Digitized from the figure."""


def rounds(overrides: Sequence[str]) -> list[StepResult]:
    steps: list[StepResult] = []
    for seed in SEEDS:
        settings = (*BASE, *overrides, f"steps={STEPS}", f"seed={seed}")
        steps += simulate(load_scenario(ROOT / "configs/scenarios/7b-8k.yaml", settings)).steps
    return steps


def mean_s(steps: Sequence[StepResult], kind: str) -> float:
    values = [step.rollout_s + step.reward_s for step in steps if step.kind == kind]
    return sum(values) / len(values)


def main() -> dict[str, Any]:
    result: dict[str, dict[str, float]] = {}
    for race, settings in RACES.items():
        result[race] = {}
        for adaptive in (False, True):
            arm = rounds((*settings, f"reward_scheduler.adaptive_timeout={adaptive}".lower()))
            for kind in ("short", "long"):
                name = f"{kind}_{'adaptive' if adaptive else 'fixed'}_s"
                result[race][name] = round(mean_s(arm, kind), 1)
    published = {
        f"{kind}_{'adaptive' if adaptive else 'fixed'}_s": seconds
        for (kind, adaptive), seconds in PUBLISHED.items()
    }
    return {"steps": STEPS, "seeds": list(SEEDS), "races": result, "published": published}


if __name__ == "__main__":
    bench(main)
