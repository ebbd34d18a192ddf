"""What the simulator says about things that none of its constants were fitted to.

Constants, presets and scenario files are used as they are shipped. Printed and written down:

- *ablation*: the parts of RollPacker added one by one to verl, and left out one by one;
- *sensitivity*: rollout seconds at other factors and length caps, rewards and training left aside;
- *scaling*: the same step on 32, 64 and 128 GPUs;
- *checks*: single facts that the RollPacker paper (arXiv 2509.21009) publishes;

Where the paper's value stood in front of the authors when this was written, it is printed beside
the simulated one; everything else is committed without having been compared with anything.

    python benchmarks/sim_predictions.py
    python benchmarks/sim_predictions.py --jobs 2
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from machine import ROOT, write_result

from rollpacker.sim.result import StepResult, SystemResult
from rollpacker.sim.scenario import load_scenario
from rollpacker.sim.simulate import simulate

SET_UPS = ("7b-8k", "14b-16k", "32b-32k")
STEPS = 40
PERIODS_STEPS = 45
"""Whole periods at factors of 1.125 (9 steps), 1.25 (5) and 1.5 (3)."""
SEEDS = (0, 1)
HARD_WORLD = tuple(f"rewards.{index}.lengths.hard_prompts=0.08" for index in range(3))
WORLDS: Mapping[str, tuple[str, ...]] = {"A": (), "B": HARD_WORLD}
"""A: what differs between responses to one prompt is nearly all luck. B: 8 % of the prompts are
hard, and each of their responses runs to the cap with probability 0.15."""
INSTANT_REWARDS = (
    *("rewards.0.seconds_quantiles={0.5: 1.0e-9}", "rewards.0.workers=100000"),
    *("rewards.1.seconds_quantiles={0.5: 1.0e-9}", "rewards.1.workers=100000"),
    "rewards.2.calls_per_s=1.0e+9",
)
"""Every verdict is there at once; the mix of prompts and their lengths stay."""
CODE_ONLY = ("rewards=[{kind: code, share: 1.0, lengths: {preset: rollpacker-code}}]",)
MATH_ONLY = ("rewards=[{kind: math, share: 1.0, lengths: {preset: rollpacker-math}}]",)

# -- the systems between verl and rollpacker --------------------------------------------

TAIL_BATCHING = ("tail_batching.enabled=true", "tail_batching.balance_sources=true")
GENERATED, SCORED = ("tail_batching.race=generated",), ("tail_batching.race=scored",)
PLANNER = ("parallelism_planner.enabled=true",)
OVERLAP = ("reward_scheduler.overlap=true",)
SCHEDULER = (*OVERLAP, "reward_scheduler.adaptive_timeout=true")
STREAM = (
    "stream_trainer.enabled=true",
    *("stream_trainer.window=[0.4, 0.5]", "stream_trainer.max_share=0.52"),
)
VERL, ROLLPACKER = ("system=verl",), ("system=rollpacker",)

ADDED: Mapping[str, tuple[str, ...]] = {
    "verl": VERL,
    "+ tail batching": (*VERL, *TAIL_BATCHING, *GENERATED),
    "+ parallelism planner": (*VERL, *TAIL_BATCHING, *GENERATED, *PLANNER),
    "+ reward scheduler": (*VERL, *TAIL_BATCHING, *SCORED, *PLANNER, *SCHEDULER),
    "+ stream trainer = rollpacker": (
        *VERL,
        *TAIL_BATCHING,
        *SCORED,
        *PLANNER,
        *SCHEDULER,
        *STREAM,
    ),
}
LEFT_OUT: Mapping[str, tuple[str, ...]] = {
    "rollpacker": ROLLPACKER,
    "- tail batching": (
        *ROLLPACKER,
        "tail_batching.enabled=false",
        "stream_trainer.kinds=[plain]",
    ),
    "- parallelism planner": (*ROLLPACKER, "parallelism_planner.enabled=false"),
    "- reward scheduler": (
        *ROLLPACKER,
        *GENERATED,
        *("reward_scheduler.overlap=false", "reward_scheduler.adaptive_timeout=false"),
    ),
    "- adaptive timeout": (*ROLLPACKER, "reward_scheduler.adaptive_timeout=false"),
    "- judge on the same GPUs": (*ROLLPACKER, "reward_scheduler.colocated_judge=false"),
    "- stream trainer": (*ROLLPACKER, "stream_trainer.enabled=false"),
}
OVERLAP_ALONE = "verl + asynchronous rewards"
OTHERS: Mapping[str, tuple[str, ...]] = {
    OVERLAP_ALONE: (*VERL, *OVERLAP),
    "rlhfuse": ("system=rlhfuse",),
    "oracle": ("system=oracle",),
}
ROLLOUT_ALONE = (
    *INSTANT_REWARDS,
    *("parallelism_planner.enabled=false", "stream_trainer.enabled=false"),
)

# -- what the paper publishes and the authors knew --------------------------------------

PUBLISHED_OVERLAP_ALONE = {"7b-8k": 1.48, "14b-16k": 1.35, "32b-32k": 1.18}
"""Speed-up of asynchronous rewards over verl: section 6.5."""
PUBLISHED_16K = {
    **{(1.0, 1.0): 277, (1.0, 1.125): 260, (1.0, 1.25): 232, (1.0, 1.5): 115},
    **{(1.125, 1.0): 244, (1.25, 1.0): 169, (1.5, 1.0): 143, (1.25, 1.25): 88},
}
"""Mean rollout seconds by (prompt factor, sample factor), 14B at 16k: Fig. 11."""

FACTORS = tuple(PUBLISHED_16K)
CAPS = (8192, 16384, 32768)
GPUS = (32, 64, 128)
SYSTEMS = ("verl", "rlhfuse", "rollpacker", "oracle")


# -- running ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One simulation."""

    set_up: str
    overrides: tuple[str, ...]
    steps: int = STEPS
    seed: int = 0


def run(job: Job) -> SystemResult:
    overrides = (*job.overrides, f"steps={job.steps}", f"seed={job.seed}")
    path = ROOT / f"configs/scenarios/{job.set_up}.yaml"
    return simulate(load_scenario(path, overrides))


Runs = Mapping[Job, SystemResult]


def seeded(set_up: str, overrides: Iterable[str], steps: int = STEPS) -> list[Job]:
    return [Job(set_up, tuple(overrides), steps, seed) for seed in SEEDS]


def of(runs: Runs, set_up: str, overrides: Iterable[str], steps: int = STEPS) -> list[SystemResult]:
    """The result of every seed."""
    return [runs[job] for job in seeded(set_up, overrides, steps)]


def mean(
    results: Sequence[SystemResult], value: Callable[[StepResult], float], kind: str | None = None
) -> float:
    """Over the steps of all seeds, of one kind of round if one is named."""
    steps = [step for r in results for step in r.steps if kind is None or step.kind == kind]
    return sum(map(value, steps)) / len(steps)


def total_s(step: StepResult) -> float:
    return step.total_s


def rollout_s(step: StepResult) -> float:
    return step.rollout_s


def told(results: Sequence[SystemResult]) -> dict[str, float]:
    """The step time, and what stands beside every speed-up."""
    n = len(results)
    return {
        "step_s": round(mean(results, total_s), 2),
        "length_shift": round(sum(r.length_shift for r in results) / n, 4),
        "tail_trained_share": round(sum(r.tail_trained_share for r in results) / n, 4),
        "generated_per_trained": round(
            sum(r.tokens_generated for r in results) / sum(r.tokens_trained for r in results), 3
        ),
    }


# -- the four parts ----------------------------------------------------------------------


def arms(world: str) -> Mapping[str, tuple[str, ...]]:
    """Systems by name: all of them in the world of the shipped scenarios, else a few."""
    systems = {**ADDED, **LEFT_OUT, **OTHERS}
    chosen = systems if world == "A" else (*SYSTEMS, "- stream trainer")
    return {name: (*systems[name], *WORLDS[world]) for name in chosen}


def ablation_jobs() -> list[Job]:
    return [
        job
        for set_up in SET_UPS
        for world in WORLDS
        for overrides in arms(world).values()
        for job in seeded(set_up, overrides)
    ]


def ablation(runs: Runs) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for world in WORLDS:
        for set_up in SET_UPS:
            rows = {
                name: told(of(runs, set_up, overrides)) for name, overrides in arms(world).items()
            }
            for row in rows.values():
                row["speedup_over_verl"] = round(rows["verl"]["step_s"] / row["step_s"], 3)
            found[f"{set_up} {world}"] = rows
    return found


def sensitivity_overrides(factors: tuple[float, float], cap: int, world: str) -> tuple[str, ...]:
    return (
        *ROLLOUT_ALONE,
        f"rollout.max_response_tokens={cap}",
        f"tail_batching.prompt_factor={factors[0]}",
        f"tail_batching.sample_factor={factors[1]}",
        *WORLDS[world],
    )


def sensitivity_jobs() -> list[Job]:
    return [
        job
        for factors in FACTORS
        for cap in CAPS
        for world in WORLDS
        for job in seeded("14b-16k", sensitivity_overrides(factors, cap, world), PERIODS_STEPS)
    ]


def sensitivity(runs: Runs) -> list[dict[str, Any]]:
    rows = []
    for factors in FACTORS:
        row: dict[str, Any] = {"prompt_factor": factors[0], "sample_factor": factors[1]}
        for cap in CAPS:
            for world in WORLDS:
                overrides = sensitivity_overrides(factors, cap, world)
                results = of(runs, "14b-16k", overrides, PERIODS_STEPS)
                row[f"{cap // 1024}k {world}"] = round(mean(results, rollout_s), 1)
        rows.append({**row, "16k published": PUBLISHED_16K[factors]})
    return rows


def scaling_overrides(system: str, gpus: int, grown: bool) -> tuple[str, ...]:
    prompts = 128 * gpus // GPUS[0] if grown else 128
    return (
        f"system={system}",
        f"cluster.gpus={gpus}",
        f"rollout.prompts_per_step={prompts}",
    )


def scaling_jobs() -> list[Job]:
    return [
        job
        for grown in (False, True)
        for gpus in GPUS
        for system in SYSTEMS
        for job in seeded("14b-16k", scaling_overrides(system, gpus, grown))
    ]


def scaling(runs: Runs) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for grown in (False, True):
        rows = []
        for gpus in GPUS:
            seconds = {
                system: mean(of(runs, "14b-16k", scaling_overrides(system, gpus, grown)), total_s)
                for system in SYSTEMS
            }
            rows.append(
                {
                    "gpus": gpus,
                    "prompts_per_step": 128 * gpus // GPUS[0] if grown else 128,
                    **{name: round(value, 1) for name, value in seconds.items()},
                    "over_verl": round(seconds["verl"] / seconds["rollpacker"], 3),
                    "over_rlhfuse": round(seconds["rlhfuse"] / seconds["rollpacker"], 3),
                }
            )
        found["batch grows with the GPUs" if grown else "same batch"] = rows
    return found


# -- single facts ------------------------------------------------------------------------

TAIL_ONLY = (*VERL, *TAIL_BATCHING, *GENERATED)
TAIL_SCORED = (*VERL, *TAIL_BATCHING, *SCORED, *SCHEDULER)
TIMEOUT_ON = (*CODE_ONLY, "system=rollpacker", "stream_trainer.enabled=false")
TIMEOUT_OFF = (*TIMEOUT_ON, "reward_scheduler.adaptive_timeout=false")
SMALL_BATCH = ("rollout.prompts_per_step=44",)
"""What the published configuration of Fig. 13 has."""
VERL_CODE = (*CODE_ONLY, *VERL)
TAIL_CODE = (*CODE_ONLY, *TAIL_ONLY)
STREAM_MATH = (*MATH_ONLY, "system=rollpacker")
NO_STREAM_MATH = (*STREAM_MATH, "stream_trainer.enabled=false")


def check_jobs() -> list[Job]:
    arms_of: Mapping[str, tuple[tuple[str, ...], ...]] = {
        "32b-32k": (VERL, TAIL_ONLY, TAIL_SCORED, ROLLPACKER),
        "7b-8k": (
            *(TIMEOUT_ON, TIMEOUT_OFF, (*TIMEOUT_ON, *SMALL_BATCH), (*TIMEOUT_OFF, *SMALL_BATCH)),
            *(STREAM_MATH, NO_STREAM_MATH),
        ),
        "14b-16k": (VERL_CODE, TAIL_CODE),
    }
    return [
        job
        for set_up, systems in arms_of.items()
        for overrides in systems
        for job in seeded(set_up, overrides)
    ]


def checks(runs: Runs) -> list[dict[str, Any]]:
    """Name, published value (None: not published), simulated value, and where it is printed."""
    rows: list[dict[str, Any]] = []

    def add(fact: str, published: float | None, simulated: float, source: str) -> None:
        rows.append(
            {
                "fact": fact,
                "published": published,
                "simulated": round(simulated, 3 if simulated < 10 else 1),
                "source": source,
            }
        )

    _add_shape(add, of(runs, "32b-32k", ROLLPACKER))
    _add_rollout_32b(add, runs)
    _add_timeouts(add, runs)
    _add_code_split(add, runs)
    steps = [step.total_s for r in of(runs, "7b-8k", VERL) for step in r.steps]
    add("7B verl, fastest step, s", 175, min(steps), "Fig. 9")
    add("7B verl, slowest step, s", 348, max(steps), "Fig. 9")
    firsts = [r.steps[0].total_s for r in of(runs, "14b-16k", VERL)]
    add("14B verl, first step, s", 504, sum(firsts) / len(firsts), "Fig. 9")
    on, off = (of(runs, "7b-8k", arm) for arm in (STREAM_MATH, NO_STREAM_MATH))
    add(
        "7B math, long step without stream trainer, s", 124.2, mean(off, total_s, "long"), "Table 3"
    )
    add("7B math, long step with it, s", 115.2, mean(on, total_s, "long"), "Table 3")
    return rows


Add = Callable[[str, float | None, float, str], None]


def _add_shape(add: Add, rollpacker: Sequence[SystemResult]) -> None:
    """Counts, which must be exact."""
    kinds = [step.kind for step in rollpacker[0].steps]
    longs = [place for place, kind in enumerate(kinds) if kind == "long"]
    periods = {after - before for before, after in itertools.pairwise(longs)}
    assert len(periods) == 1, "long rounds do not come at a fixed period"
    add("steps from one long round to the next", 5, periods.pop(), "section 3, Fig. 9")
    add("share of long rounds", 0.2, len(longs) / len(kinds), "section 3")
    scenario = load_scenario(ROOT / "configs/scenarios/32b-32k.yaml")
    tail, rollout = scenario.tail_batching, scenario.rollout
    launched = tail.factors.num_prompts(rollout.prompts_per_step) * tail.factors.num_samples(
        rollout.samples_per_prompt
    )
    add("samples launched in a short round", 1600, launched, "section 3")
    add(
        "samples trained in a short round",
        1024,
        mean(rollpacker, _num_trained, "short"),
        "section 3",
    )


def _num_trained(step: StepResult) -> float:
    return step.num_trained


def _longest(step: StepResult) -> float:
    return step.max_response_tokens


def _add_rollout_32b(add: Add, runs: Runs) -> None:
    verl, generated, scored = (of(runs, "32b-32k", arm) for arm in (VERL, TAIL_ONLY, TAIL_SCORED))
    add("32B rollout, verl, s", 567.4, mean(verl, rollout_s), "Fig. 10b")
    for name, results in (("rewards synchronous", generated), ("race on scored", scored)):
        what = f"32B rollout, tail batching, {name}"
        add(f"{what}, short, s", 75.4, mean(results, rollout_s, "short"), "Fig. 10b")
        add(f"{what}, long, s", 574.3, mean(results, rollout_s, "long"), "Fig. 10b")
        add(f"{what}, mean, s", 175.2, mean(results, rollout_s), "Fig. 10b")
    add(
        "32B longest in a short round, scored, tokens", 1439, mean(scored, _longest, "short"), "10a"
    )


def _rollout_and_wait_s(step: StepResult) -> float:
    return step.rollout_s + step.reward_s


def _add_timeouts(add: Add, runs: Runs) -> None:
    """Rollout and asynchronous reward of 7B on code alone."""
    published = {("on", "short"): 31.8, ("off", "short"): 55.9}
    published |= {("on", "long"): 82.0, ("off", "long"): 79.7}
    for batch, name in (((), "128"), (SMALL_BATCH, "44")):
        for arm, overrides in (("on", TIMEOUT_ON), ("off", TIMEOUT_OFF)):
            results = of(runs, "7b-8k", (*overrides, *batch))
            for kind in ("short", "long"):
                add(
                    f"7B code, {name} prompts, adaptive timeout {arm}, {kind}, s",
                    published[arm, kind],
                    mean(results, _rollout_and_wait_s, kind),
                    "Fig. 13c",
                )


def _add_code_split(add: Add, runs: Runs) -> None:
    """Stages of 14B on code alone, per step."""
    verl, tail = (of(runs, "14b-16k", arm) for arm in (VERL_CODE, TAIL_CODE))

    def reward_s(step: StepResult) -> float:
        return step.reward_s

    def train_s(step: StepResult) -> float:
        return step.train_s

    add("14B code, verl: rollout, s", 225, mean(verl, rollout_s), "Fig. 4b")
    add("14B code, verl: reward, s", 45, mean(verl, reward_s), "Fig. 4b")
    add("14B code, verl: training, s", 70, mean(verl, train_s), "Fig. 4b")
    add(
        "14B code, tail batching: short rollout, s", 87.7, mean(tail, rollout_s, "short"), "Fig. 4b"
    )
    add("14B code, tail batching: long rollout, s", 255, mean(tail, rollout_s, "long"), "Fig. 4b")
    add("14B code, tail batching: reward, s", 51, mean(tail, reward_s), "Fig. 4b")
    add("14B code, tail batching: training, s", 57, mean(tail, train_s), "Fig. 4b")


# -- printing ----------------------------------------------------------------------------


def show(payload: Mapping[str, Any]) -> None:
    for where, rows in payload["ablation"].items():
        print(f"\n{where}: step seconds, over verl, length shift, beyond P95, generated/trained")
        for name, row in rows.items():
            print(
                f"  {name:<30} {row['step_s']:7.1f} {row['speedup_over_verl']:5.2f}x "
                f"{row['length_shift']:+6.1%} {row['tail_trained_share']:5.1%} "
                f"{row['generated_per_trained']:5.2f}"
            )
    print("\nspeed-up of asynchronous rewards alone, published beside it")
    for set_up, row in payload["asynchronous_rewards_alone"].items():
        print(f"  {set_up:<8} {row['simulated']:.2f}x {row['published']:.2f}x")
    print("\n14B: mean rollout seconds at (prompt factor, sample factor), rewards off")
    columns = [name for name in payload["sensitivity"][0] if name not in _FACTOR_KEYS]
    print(" " * 15 + " ".join(f"{name:>13}" for name in columns))
    for row in payload["sensitivity"]:
        factors = f"({row['prompt_factor']:g}, {row['sample_factor']:g})"
        print(f"{factors:<15}" + " ".join(f"{row[name]:13.1f}" for name in columns))
    for name, rows in payload["scaling"].items():
        print(f"\n14B, {name}: step seconds")
        print(" " + " ".join(f"{key:>16}" for key in rows[0]))
        for row in rows:
            print(" " + " ".join(f"{value:16g}" for value in row.values()))
    print(f"\n{'fact':<62} {'published':>9} {'simulated':>9}")
    for row in payload["checks"]:
        print(f"{row['fact']:<62} {row['published']:9g} {row['simulated']:9g}  {row['source']}")


_FACTOR_KEYS = ("prompt_factor", "sample_factor")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=1, help="simulations at the same time")
    args = parser.parse_args()
    jobs = [*ablation_jobs(), *sensitivity_jobs(), *scaling_jobs(), *check_jobs()]
    jobs = list(dict.fromkeys(jobs))
    began = time.monotonic()
    with ProcessPoolExecutor(args.jobs) as pool:
        runs = dict(zip(jobs, pool.map(run, jobs, chunksize=4), strict=True))
    found = ablation(runs)
    payload = {
        "steps": STEPS,
        "seeds": list(SEEDS),
        "simulations": len(jobs),
        "seconds": round(time.monotonic() - began, 1),
        "ablation": found,
        "asynchronous_rewards_alone": {
            set_up: {
                "simulated": found[f"{set_up} A"][OVERLAP_ALONE]["speedup_over_verl"],
                "published": published,
            }
            for set_up, published in PUBLISHED_OVERLAP_ALONE.items()
        },
        "sensitivity": sensitivity(runs),
        "scaling": scaling(runs),
        "checks": checks(runs),
    }
    show(payload)
    write_result("sim_predictions", payload)
    return 0


if __name__ == "__main__":
    sys.exit(main())
