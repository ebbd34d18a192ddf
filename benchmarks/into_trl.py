"""TRL's `GRPOTrainer` with `rollpacker.integrations.trl` and without: the same model, prompts,
reward and steps.

TRL's fastest setting is found first; then TRL alone, TRL with RollPacker's engine and TRL with
tail batching take turns, each from the same start weights on the same rows. What is left out at
the beginning of a turn is a whole period of tail batching, and all of its responses are trained on
by the end: both sides train on as many.

    python benchmarks/into_trl.py [--quick] [--learn STEPS]

`--learn` trains the quickstart's task with tail batching instead, and says how its reward rose.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import logging
import os
import statistics
import warnings
from typing import Any

from machine import write_result
from step_times import StepTime, describe
from trl_side import TrlSetting, continuous_batching, trl_run, trl_steps
from vs_trl import block_config, ratio, seconds_per_longest
from workload import add_workload_arguments, describe_workload, load_workload

from rollpacker.config.schema import RunConfig

SIZES = (16, 64)
"""Prompts per step."""
FROZEN = 1e-30
"""A learning rate by which no weight moves."""
WINDOW = 10
"""Steps that a mean reward is taken over."""
PERIOD = 3
"""Steps after which the long queue is empty again at a factor of 1.5."""
SAMPLES_PER_PASS = 32
"""Of a forward and backward pass, on all sides: TRL pads to a step's longest response anyway."""


def settings(samples: int) -> list[TrlSetting]:
    """TRL's own ways to generate."""
    paged = {
        f"continuous batching of {tokens}": continuous_batching(tokens, blocks)
        for tokens, blocks in ((samples // 2, 256), (samples, 128 if samples < 256 else 1024))
    }
    found = [TrlSetting(name="generate", samples_per_pass=SAMPLES_PER_PASS)]
    return found + [
        TrlSetting(name=name, samples_per_pass=SAMPLES_PER_PASS, options=options)
        for name, options in paged.items()
    ]


def with_rollpacker(name: str, **keys: Any) -> TrlSetting:
    return TrlSetting(name=name, samples_per_pass=SAMPLES_PER_PASS, rollout=keys)


def config_of(config: RunConfig, prompts: int) -> RunConfig:
    """This many prompts a step, rows in file order, weights that do not move."""
    rollout = dataclasses.replace(config.rollout, prompts_per_step=prompts)
    data = dataclasses.replace(config.data, eval=None, eval_fraction=0.0, shuffle=False)
    train = dataclasses.replace(
        config.train, schedule="constant", warmup_steps=0, learning_rate=FROZEN
    )
    return dataclasses.replace(config, rollout=rollout, data=data, train=train)


def run_size(config: RunConfig, prompts: int, blocks: int, periods: int) -> dict[str, Any]:
    """The policy is frozen for the comparison of seconds: arms train on the same responses, in
    another order."""
    own = config_of(config, prompts)
    tried = {
        setting.name: (setting, trl_steps(own, 2, setting)[1:])
        for setting in settings(prompts * own.rollout.samples_per_prompt)
    }
    best = min((setting for setting, _ in tried.values()), key=lambda s: _speed(tried, s))
    arms = [
        dataclasses.replace(best, name="TRL"),
        with_rollpacker("TRL, RollPacker's engine", enabled=False),
        with_rollpacker("TRL, tail batching", prompt_factor=1.5),
    ]
    steps: dict[str, list[StepTime]] = {arm.name: [] for arm in arms}
    for block in range(1, blocks + 1):
        for arm in arms:
            gc.collect()
            taken = trl_steps(block_config(own, block), (periods + 1) * PERIOD, arm)
            steps[arm.name] += taken[PERIOD:]
    alone, engine, batched = (steps[arm.name] for arm in arms)
    return {
        "prompts_per_step": prompts,
        "best_trl": best.name,
        "tried": {name: describe(taken) for name, (_, taken) in tried.items()},
        "arms": {name: describe(taken) for name, taken in steps.items()},
        "engine": ratio(alone, engine),
        "tail_batching": ratio(alone, batched),
        "tail_batching_over_engine": ratio(engine, batched),
        "same_responses": _lengths(engine) == _lengths(batched),
    }


def _speed(tried: dict[str, tuple[TrlSetting, list[StepTime]]], setting: TrlSetting) -> float:
    return seconds_per_longest(tried[setting.name][1])


def _lengths(steps: list[StepTime]) -> list[int]:
    return sorted(length for step in steps for length in step.lengths)


def learn(config: RunConfig, num_steps: int) -> dict[str, Any]:
    """The config's own step size and learning rate, from its start weights."""
    data = dataclasses.replace(config.data, eval=None, eval_fraction=0.0)
    own = dataclasses.replace(config, data=data)
    rewards = trl_run(own, num_steps, with_rollpacker("tail batching", prompt_factor=1.5)).rewards
    first, last = rewards[:WINDOW], rewards[-WINDOW:]
    means = [statistics.fmean(first), statistics.fmean(last)]
    print(f"mean reward of the first and last {WINDOW} of {num_steps} steps: {means}")
    return {"steps": num_steps, "window": WINDOW, "rewards": rewards, "means": means}


def print_result(result: dict[str, Any]) -> None:
    print(f"\n{result['prompts_per_step']} prompts a step; TRL by {result['best_trl']}")
    print(f"{'':30}{'s/step':>8}{'gener.':>8}{'tokens':>8}{'longest':>9}{'comp/real':>11}")
    for name, arm in result["arms"].items():
        print(
            f"{name:30}{arm['s_per_step']:8.3f}{arm['generation_s']:8.3f}"
            f"{arm['mean_tokens']:8.1f}{arm['mean_longest']:9.0f}"
            f"{arm['train_computed_per_real']:11.2f}"
        )
    for name in ("engine", "tail_batching", "tail_batching_over_engine"):
        value, (low, high) = result[name]
        print(f"steps per second, {name.replace('_', ' ')}: {value:.2f}x ({low:.2f}-{high:.2f})")
    print(f"trained on the same responses: {result['same_responses']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_workload_arguments(parser)
    parser.add_argument("--blocks", type=int, default=3, help="turns of each arm (default: 3)")
    parser.add_argument("--periods", type=int, default=3, help="measured periods per turn")
    parser.add_argument("--learn", type=int, metavar="STEPS", help="train instead of comparing")
    parser.add_argument("--quick", action="store_true", help="a smoke test; no result is written")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # also for threads that torch starts later
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    warnings.filterwarnings("ignore")
    import torch

    torch.set_num_threads(args.threads)
    logging.disable(logging.WARNING)
    config = load_workload(args)
    setup = describe_workload(config, args)
    if args.learn:
        write_result("into_trl_learning", {"setup": setup, **learn(config, args.learn)})
        return 0
    sizes, blocks, periods = SIZES, args.blocks, args.periods
    if args.quick:
        sizes, blocks, periods = (8,), 1, 1
    results = []
    for prompts in sizes:
        results.append(run_size(config, prompts, blocks, periods))
        print_result(results[-1])
    if args.quick:
        return 0
    payload = {"setup": setup, "results": results}
    print(f"written: {write_result('into_trl', payload).name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
