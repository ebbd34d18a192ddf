"""How far the simulator is from the published step times that its constants were fitted to.

The RollPacker paper (arXiv 2509.21009) publishes the step times of three systems on three set-ups
(Fig. 9; means read off the figure). The constants of `rollpacker.sim` were fitted to these nine
means, to short and long rounds apart, and to the splits of Fig. 4b and 10c; this prints what is
left of them, and every fitted constant. Exit code 1 if a mean is off by more than 7 % or a kind of
round by more than 10 %.

    python benchmarks/sim_calibration.py
    python benchmarks/sim_calibration.py --fit 900     # search for better constants, 900 seconds
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from machine import ROOT, write_result

from rollpacker.sim import presets, simulate
from rollpacker.sim.latency import Calibration
from rollpacker.sim.result import SystemResult
from rollpacker.sim.scenario import load_scenario

PUBLISHED = {
    "7b-8k": {"verl": 233.4, "rlhfuse": 130.9, "rollpacker": 115.1, "short": 110.6, "long": 133.1},
    "14b-16k": {
        **{"verl": 382.8, "rlhfuse": 291.4, "rollpacker": 172.1},
        **{"short": 138.6, "long": 306.3},
    },
    "32b-32k": {
        **{"verl": 874.6, "rlhfuse": 766.4, "rollpacker": 341.2},
        **{"short": 242.4, "long": 736.8},
    },
}
"""Mean seconds of a step over 40 steps: Fig. 9 of the paper."""
SYSTEMS = ("verl", "rlhfuse", "rollpacker")
MEAN_BOUND, ROUND_BOUND = 0.07, 0.10

Constants = dict[str, float]
"""Values of the fitted constants, by name."""


def shipped() -> Constants:
    """The fitted constants as they are shipped."""
    calibration = Calibration()
    fixed = {name: load(name, "verl", ()).train.fixed_s or 0.0 for name in PUBLISHED}
    return {
        "launch_layer_s": calibration.launch_layer_s,
        "per_sequence_s": calibration.per_sequence_s,
        "train_utilization": calibration.train_utilization,
        **{f"train_fixed_s {name}": seconds for name, seconds in fixed.items()},
        "judge_calls_per_s": presets.REWARD_KINDS["judge"].calls_per_s or 0.0,
        "synchronous_judge_share": simulate.SYNCHRONOUS_JUDGE_SHARE,
        "streamed_share": presets.STREAMED_SHARE,
        "sandbox_workers": float(presets.REWARD_KINDS["code"].workers or 0),
    }


SOURCES = {
    "launch_layer_s": ("s per layer of a decode step", "Fig. 9, all systems; tail speeds"),
    "per_sequence_s": ("s per running sequence of a decode step", "Fig. 9, short rounds"),
    "train_utilization": ("share of the datasheet's FLOP/s", "Fig. 4b and 10c, training"),
    "train_fixed_s 7b-8k": ("s", "Fig. 10c, training"),
    "train_fixed_s 14b-16k": ("s", "Fig. 10c, training"),
    "train_fixed_s 32b-32k": ("s", "Fig. 10c, training"),
    "judge_calls_per_s": ("calls per s, whatever the GPUs", "Fig. 9, short rounds"),
    "synchronous_judge_share": ("share of that rate", "Fig. 4b rewards; Fig. 9, verl"),
    "streamed_share": ("share of a step's samples", "Fig. 10c, training of long rounds"),
    "sandbox_workers": ("checks at once", "Fig. 4b rewards; Fig. 13c"),
}
"""Unit, and what each constant was fitted to. One more, the share of the responses at the 16k cap
that run past 32k (presets), was fitted to the long rounds of 32b-32k (Fig. 10a)."""


def load(name: str, system: str, overrides: tuple[str, ...]) -> Any:
    return load_scenario(ROOT / f"configs/scenarios/{name}.yaml", overrides, system)


def run(name: str, system: str, constants: Constants, steps: int) -> SystemResult:
    """One system on one set-up with these constants."""
    simulate.SYNCHRONOUS_JUDGE_SHARE = constants["synchronous_judge_share"]
    scenario = load(
        name,
        system,
        (
            f"steps={steps}",
            f"train.fixed_s={constants[f'train_fixed_s {name}']}",
            f"rewards.1.workers={round(constants['sandbox_workers'])}",
            f"rewards.2.calls_per_s={constants['judge_calls_per_s']}",
        ),
    )
    stream = scenario.stream_trainer
    if stream.enabled:
        stream = dataclasses.replace(stream, max_share=constants["streamed_share"])
    calibration = Calibration(
        launch_layer_s=constants["launch_layer_s"],
        per_sequence_s=constants["per_sequence_s"],
        train_utilization=constants["train_utilization"],
    )
    scenario = dataclasses.replace(scenario, stream_trainer=stream)
    return simulate.simulate(scenario, calibration=calibration)


def _run(job: tuple[str, str, Constants, int]) -> SystemResult:
    return run(*job)


def ratios(results: dict[tuple[str, str], SystemResult]) -> dict[tuple[str, str], float]:
    """Simulated over published, by set-up and system or kind of round."""
    found = {}
    for (name, system), result in results.items():
        found[name, system] = result.mean["total_s"] / PUBLISHED[name][system]
        if system == "rollpacker":
            for kind in ("short", "long"):
                seconds = [step.total_s for step in result.steps if step.kind == kind]
                found[name, kind] = sum(seconds) / len(seconds) / PUBLISHED[name][kind]
    return found


def evaluate(
    pool: ProcessPoolExecutor, constants: Constants, steps: int
) -> dict[tuple[str, str], SystemResult]:
    keys = [(name, system) for name in PUBLISHED for system in SYSTEMS]
    jobs = [(*key, constants, steps) for key in keys]
    return dict(zip(keys, pool.map(_run, jobs), strict=True))


def loss(found: dict[tuple[str, str], float]) -> float:
    """The worst error, means counting more than kinds of round, and a part of the usual one."""
    errors = [
        math.log(ratio) * (0.7 if what in ("short", "long") else 1.0)
        for (_, what), ratio in found.items()
    ]
    return max(map(abs, errors)) + 0.5 * math.sqrt(sum(e * e for e in errors) / len(errors))


def fit(pool: ProcessPoolExecutor, seconds: float) -> Constants:
    """A random search in one to three constants at a time, from the shipped ones."""
    rng = random.Random(0)
    best = shipped()
    best_loss = loss(ratios(evaluate(pool, best, 25)))
    scale, end = 0.12, time.monotonic() + seconds
    while time.monotonic() < end:
        tried = dict(best)
        for name in rng.sample(sorted(best), rng.choice([1, 2, 3])):
            tried[name] *= math.exp(rng.gauss(0.0, scale))
        tried["streamed_share"] = min(tried["streamed_share"], 1.0)
        new_loss = loss(ratios(evaluate(pool, tried, 25)))
        if new_loss < best_loss:
            best, best_loss = tried, new_loss
            print(f"{best_loss:.4f}", {k: float(f"{v:.4g}") for k, v in best.items()}, flush=True)
        else:
            scale = max(0.02, scale * 0.985)
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--fit", type=float, metavar="SECONDS", help="search for so long first")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    with ProcessPoolExecutor() as pool:
        constants = fit(pool, args.fit) if args.fit else shipped()
        results = evaluate(pool, constants, args.steps)
    found = ratios(results)
    print(f"{'set-up':<9} {'what':<11} {'published s':>11} {'simulated s':>11} {'ratio':>6}")
    for (name, what), ratio in found.items():
        published = PUBLISHED[name][what]
        print(f"{name:<9} {what:<11} {published:11.1f} {published * ratio:11.1f} {ratio:6.3f}")
    means = {key: r for key, r in found.items() if key[1] in SYSTEMS}
    rounds = {key: r for key, r in found.items() if key[1] not in SYSTEMS}
    worst_mean = max(abs(r - 1) for r in means.values())
    worst_round = max(abs(r - 1) for r in rounds.values())
    print(f"worst of the nine means {worst_mean:.1%}, worst kind of round {worst_round:.1%}\n")
    for name, (unit, fitted_to) in SOURCES.items():
        print(f"{name:<24} {constants[name]:<10.4g} {unit:<42} {fitted_to}")
    splits = {
        f"{name} {system}": {
            kind: {
                stage: sum(getattr(s, stage) for s in steps) / len(steps)
                for stage in ("rollout_s", "reward_s", "train_s", "sync_s", "total_s")
            }
            for kind in ("plain", "short", "long")
            if (steps := [s for s in result.steps if s.kind == kind])
        }
        for (name, system), result in results.items()
    }
    missed = [k for k, r in means.items() if abs(r - 1) > MEAN_BOUND]
    missed += [k for k, r in rounds.items() if abs(r - 1) > ROUND_BOUND]
    if not args.fit:
        write_result(
            "sim_calibration",
            {
                "ratios": {" ".join(key): round(r, 4) for key, r in found.items()},
                "worst_mean": worst_mean,
                "worst_round": worst_round,
                "constants": constants,
                "splits": splits,
            },
        )
    for name, what in missed:
        print(f"missed: {name} {what}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
