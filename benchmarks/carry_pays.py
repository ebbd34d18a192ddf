"""What does `tail_batching.carry: auto` cost or save where carried tokens come out differently?

The 7B set-up of the RollPacker paper (arXiv 2509.21009), simulated, at growing chances per token
and update that a carried token comes out differently: seconds of a step with `carry` exact, auto
and none, of a queue and of a pool with factor 1.5, and without tail batching; and the length shift,
against what the very prompts that were trained on would give if nobody selected. With `none` no
complement rule holds: what it gains is by shorter responses.

    python benchmarks/carry_pays.py [--steps 200] [--seeds 3] [--only auto]

Exits with 1 and says where if `auto` takes more than 2 % longer than the faster of `exact` and no
tail batching, or shifts lengths by more than 1 %. Steps count from `WARM_STEPS` on, after the
trial.
"""

from __future__ import annotations

import statistics
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from lab import ROOT, bench, earlier, paired_interval

from rollpacker.sim.scenario import load_scenario
from rollpacker.sim.simulate import simulate

SET_UP = "7b-8k"
RATES = (0.0, 1e-3, 1e-2)
WARM_STEPS = 20
MOST_OVER, MOST_SHIFT = 1.02, 0.01
FIRST_SEED = 3000
OFF = "off"


Job = tuple[str, float, int, int]
"""Straggler's place and `carry`, such as "queue auto", or `OFF`; chance, seed and steps."""


def run(job: Job) -> dict[str, float]:
    arm, rate, seed, steps = job
    overrides = ["system=rollpacker", f"seed={seed}", f"steps={steps}"]
    if arm == OFF:
        overrides += ["tail_batching.enabled=false"]
    else:
        stragglers, carry = arm.split()
        tail = {"stragglers": stragglers, "carry": carry, "prompt_factor": 1.5}
        overrides += [f"tail_batching.{key}={value}" for key, value in tail.items()]
        overrides += [f"carry.mismatch={rate}"]
    path = ROOT / "configs" / "scenarios" / f"{SET_UP}.yaml"
    result = simulate(load_scenario(path, overrides))
    return {
        "all_step_s": statistics.fmean(step.total_s for step in result.steps),
        "step_s": statistics.fmean(step.total_s for step in result.steps[WARM_STEPS:]),
        "shift": result.paired_shift,
    }


def row(runs: list[dict[str, float]]) -> dict[str, Any]:
    mean, low, high = paired_interval([one["shift"] for one in runs])
    return {
        "step_s": round(statistics.fmean(one["step_s"] for one in runs), 1),
        "all_step_s": round(statistics.fmean(one["all_step_s"] for one in runs), 1),
        "shift": round(mean, 4),
        "shift_95": [round(low, 4), round(high, 4)],
    }


def missed(found: dict[str, dict[str, Any]]) -> list[str]:
    """Where the claims do not hold, in words."""
    wrong = []
    for rate in RATES:
        for kind in ("queue", "pool"):
            auto = found[f"{kind} auto, {rate:g}"]
            best = min(found[one]["step_s"] for one in (f"{kind} exact, {rate:g}", OFF))
            if auto["step_s"] > MOST_OVER * best:
                wrong.append(f"{kind} at {rate:g}: {auto['step_s']} s a step, and {best} s are due")
            if abs(auto["shift"]) > MOST_SHIFT:
                wrong.append(f"{kind} at {rate:g}: lengths shift by {auto['shift']:.1%}")
    return wrong


def main(steps: int = 200, seeds: int = 3, jobs: int = 2, only: str = "") -> dict[str, Any]:
    """`only`: arms whose names have this; the kept result has the rest."""
    numbers = range(FIRST_SEED, FIRST_SEED + seeds)
    arms = {
        f"{kind} {carry}, {rate:g}": (f"{kind} {carry}", rate)
        for rate in RATES
        for kind in ("queue", "pool")
        for carry in ("exact", "auto", "none")
    }
    arms[OFF] = (OFF, 0.0)
    arms = {name: arm for name, arm in arms.items() if only in name}
    wanted = [(name, (*arm, seed, steps)) for name, arm in arms.items() for seed in numbers]
    with ProcessPoolExecutor(jobs) as pool:
        results = list(pool.map(run, [job for _, job in wanted]))
    found = earlier(main, "arms") if only else {}
    found |= {
        name: row([one for (of, _), one in zip(wanted, results, strict=True) if of == name])
        for name in arms
    }
    return {
        **{"steps": steps, "seeds": list(numbers), "warm_steps": WARM_STEPS},
        "missed": missed(found),
        "arms": found,
    }


if __name__ == "__main__":
    bench(main, holds=lambda found: not found["missed"])
