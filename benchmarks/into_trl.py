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

import dataclasses
import gc
import statistics
from pathlib import Path
from typing import Any

from lab import bench, write_result
from step_times import StepTime, describe
from trl_side import TrlSetting, continuous_batching, trl_run, trl_steps
from vs_trl import block_config, in_file_order, prepared, ratio, seconds_per_longest
from workload import QUICKSTART, describe_workload

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
    own = in_file_order(config, prompts)
    train = dataclasses.replace(own.train, learning_rate=FROZEN)
    return dataclasses.replace(own, train=train)


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


def learned(config: RunConfig, num_steps: int) -> dict[str, Any]:
    """The config's own step size and learning rate, from its start weights."""
    data = dataclasses.replace(config.data, eval=None, eval_fraction=0.0)
    own = dataclasses.replace(config, data=data)
    rewards = trl_run(own, num_steps, with_rollpacker("tail batching", prompt_factor=1.5)).rewards
    first, last = rewards[:WINDOW], rewards[-WINDOW:]
    means = [statistics.fmean(first), statistics.fmean(last)]
    print(f"mean reward of the first and last {WINDOW} of {num_steps} steps: {means}")
    return {"steps": num_steps, "window": WINDOW, "rewards": rewards, "means": means}


def main(
    config: Path = QUICKSTART,
    model: Path | None = None,
    threads: int = 1,
    blocks: int = 3,
    periods: int = 3,
    learn: int = 0,
    quick: bool = False,
) -> dict[str, Any] | None:
    """`blocks`: turns of each arm, of so many measured `periods`. `learn`: train so many steps
    instead."""
    workload = prepared(config, model, threads)
    setup = {"setup": describe_workload(workload, config)}
    if learn:
        write_result("into_trl_learning", {**setup, **learned(workload, learn)})
        return None
    counts = (1, 1) if quick else (blocks, periods)
    results = [run_size(workload, prompts, *counts) for prompts in ((8,) if quick else SIZES)]
    return {**setup, "results": results}


if __name__ == "__main__":
    bench(main)
