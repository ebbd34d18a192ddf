"""How much faster is a pool that only changes the order, and what do mismatches cost it?

For the three set-ups of the RollPacker paper (arXiv 2509.21009), simulated: steps and rollouts over
those of verl, for the published setting and for the preset `rollpacker` at growing chances per
token and update that a carried token comes out differently, with the complement rule and without.
Beside each the length shift, against what the very prompts that were trained on would give if
nobody selected. `planned` is the fastest of a few settings whose shift is within 2 % at that rate.

    python benchmarks/order_only_sim.py [--steps 50] [--seeds 3] [--jobs 2]

Exits with 1 and says which if a speed-up at mismatch 0 is missed, or the lengths shift there.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from lab import ROOT, bench

from rollpacker.sim.scenario import load_scenario
from rollpacker.sim.simulate import simulate

LEAST_SPEEDUP = {"7b-8k": 2.3, "14b-16k": 2.6, "32b-32k": 2.8}
"""The least speed-up of a step over verl's, at no shift of lengths."""
MAX_SHIFT = 0.02
RATES = (1e-5, 1e-4, 1e-3, 1e-2)
WARM_STEPS = 10
"""A pool begins without stragglers: these steps do not count."""
SEARCH_STEPS = 30
FIRST_SEED = 3000

VERL, PUBLISHED = ("system=verl",), ("system=rollpacker-published",)
OURS = ("system=rollpacker",)
QUEUE = ("tail_batching.stragglers=queue", "tail_batching.prompt_factor=1.5")
"""Settings of a run by default."""
NO_COMPLEMENT = "tail_batching.complement=false"
DRAFTS = {"alone": 0.41, "siblings": 0.57}
"""Acceptance of drafts: 1.70 and 2.32 tokens a step, published for Seer (arXiv 2511.14617)."""
CAREFUL = tuple(
    (*OURS, *setting, *rule)
    for setting in (
        ("tail_batching.prompt_factor=1.25", "tail_batching.max_deferrals=4"),
        ("tail_batching.prompt_factor=1.5", "tail_batching.max_deferrals=8"),
        ("tail_batching.prompt_factor=1.125", "tail_batching.stragglers=queue"),
        ("tail_batching.prompt_factor=1.25", "tail_batching.stragglers=queue"),
    )
    for rule in ((), (NO_COMPLEMENT,))
)


@dataclass(frozen=True)
class Job:
    set_up: str
    overrides: tuple[str, ...]
    seed: int
    steps: int


def run(job: Job) -> dict[str, float]:
    path = ROOT / "configs" / "scenarios" / f"{job.set_up}.yaml"
    total = job.steps + WARM_STEPS
    scenario = load_scenario(path, [*job.overrides, f"seed={job.seed}", f"steps={total}"])
    result = simulate(scenario)
    steps = result.steps[WARM_STEPS:]
    return {
        "step_s": statistics.fmean(step.total_s for step in steps),
        "rollout_s": statistics.fmean(step.rollout_s for step in steps),
        "shift": result.paired_shift,
        "generated_per_trained": result.tokens_generated / result.tokens_trained,
        "mismatch": result.mismatch,
    }


def arms() -> dict[str, tuple[str, ...]]:
    found = {"verl": VERL, "published": PUBLISHED, "mismatch 0": OURS}
    found["queue, mismatch 0"] = (*OURS, *QUEUE)
    for name, acceptance in DRAFTS.items():
        drafts = f"rollout.drafts={{acceptance: {acceptance}}}"
        found[f"mismatch 0, drafts {name}"] = (*OURS, drafts)
    for rate in RATES:
        at = (*OURS, f"carry.mismatch={rate}")
        found[f"mismatch {rate:.0e}"] = at
        found[f"queue, mismatch {rate:.0e}"] = (*at, *QUEUE)
        found[f"mismatch {rate:.0e}, no complement"] = (*at, NO_COMPLEMENT)
    return found


def row(runs: list[dict[str, float]], verl: list[dict[str, float]]) -> dict[str, Any]:
    """Means over the seeds; a speed-up is that of each seed."""
    steps = [v["step_s"] / r["step_s"] for r, v in zip(runs, verl, strict=True)]
    rollouts = [v["rollout_s"] / r["rollout_s"] for r, v in zip(runs, verl, strict=True)]
    return {
        "step_s": round(statistics.fmean(r["step_s"] for r in runs), 1),
        "step_speedup": round(statistics.fmean(steps), 3),
        "step_speedups": [round(value, 3) for value in steps],
        "rollout_speedup": round(statistics.fmean(rollouts), 3),
        "shift": round(statistics.fmean(r["shift"] for r in runs), 4),
        "shifts": [round(r["shift"], 4) for r in runs],
        "generated_per_trained": round(
            statistics.fmean(r["generated_per_trained"] for r in runs), 3
        ),
        "mismatch": statistics.fmean(r["mismatch"] for r in runs),
    }


def planned(pool: ProcessPoolExecutor, set_up: str, rate: float) -> tuple[str, ...]:
    """The fastest setting whose lengths keep, on a seed of its own."""
    at = f"carry.mismatch={rate}"
    tried = [(*setting, at) for setting in (OURS, (*OURS, NO_COMPLEMENT), *CAREFUL)]
    jobs = [Job(set_up, one, FIRST_SEED - 1, SEARCH_STEPS) for one in [VERL, *tried]]
    verl, *found = pool.map(run, jobs)
    fit = [
        (result["step_s"], one)
        for one, result in zip(tried, found, strict=True)
        if abs(result["shift"]) <= MAX_SHIFT and result["step_s"] < verl["step_s"]
    ]
    return min(fit)[1] if fit else VERL


def study(pool: ProcessPoolExecutor, set_up: str, steps: int, seeds: Iterable[int]) -> Any:
    settings, seeds = arms(), list(seeds)
    jobs = {
        (name, seed): Job(set_up, overrides, seed, steps)
        for seed in seeds
        for name, overrides in settings.items()
    }
    results = dict(zip(jobs, pool.map(run, jobs.values()), strict=True))
    of = {name: [results[name, seed] for seed in seeds] for name in settings}
    return {name: row(runs, of["verl"]) for name, runs in of.items()}


def plan_rates(pool: ProcessPoolExecutor, set_up: str, steps: int, seeds: Iterable[int]) -> Any:
    """Simulate the setting that keeps the lengths, for each rate, on fresh seeds."""
    found, seeds = {}, list(seeds)
    for rate in RATES:
        chosen = planned(pool, set_up, rate)
        jobs = [Job(set_up, one, seed, steps) for seed in seeds for one in (VERL, chosen)]
        runs = list(pool.map(run, jobs))
        changes = [text for text in chosen if not text.startswith("carry.")]
        found[f"{rate:.0e}"] = {"setting": changes, **row(runs[1::2], runs[::2])}
    return found


def missed(set_up: str, found: dict[str, Any]) -> list[str]:
    """The bounds that this set-up misses, in words."""
    free, least = found["mismatch 0"], LEAST_SPEEDUP[set_up]
    wrong = []
    if free["step_speedup"] < least:
        wrong.append(f"{set_up}: {free['step_speedup']:.2f}x over verl, less than {least}x")
    if free["shift"]:
        wrong.append(f"{set_up}: the lengths shift by {free['shift']:.1%} without mismatches")
    return wrong


def main(steps: int = 50, seeds: int = 3, jobs: int = 2, quick: bool = False) -> dict[str, Any]:
    setups = [*LEAST_SPEEDUP][: 1 if quick else None]
    numbers = range(FIRST_SEED, FIRST_SEED + seeds)
    with ProcessPoolExecutor(jobs) as pool:
        found = {one: study(pool, one, steps, numbers) for one in setups}
        plans = {one: plan_rates(pool, one, steps, numbers) for one in setups if not quick}
    return {
        **{"steps": steps, "seeds": list(numbers), "warm_steps": WARM_STEPS},
        "least_speedup": LEAST_SPEEDUP,
        "missed": [text for one, arms in found.items() for text in missed(one, arms)],
        "arms": found,
        "planned": plans,
    }


if __name__ == "__main__":
    bench(main, holds=lambda found: not found["missed"])
