"""Fits the simulator's constants to everything that the RollPacker paper publishes.

The facts are those of `sim_published.py`. Minimised is the mean squared log error, weighted by
group (`WEIGHTS`) and linear beyond a factor of 1.25 (Huber), so that one figure that contradicts
all others does not bend them. All constants move together, by damped Gauss-Newton steps whose
derivatives are corrected from step to step (Broyden). Without `--search` the loss of the shipped
constants is written down, beside that of worlds A and B of the blind predictions.

    python benchmarks/sim_calibration.py
    python benchmarks/sim_calibration.py --search 1500 --jobs 2     # search, 1500 seconds
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
from lab import PUBLISHED, bench
from numpy.typing import NDArray
from sim_published import (
    Constants,
    Outcome,
    Sim,
    error_factor,
    facts,
    run_all,
    shipped,
    sims_of,
    table,
)
from sim_published import by_group as error_factors

WEIGHTS: Mapping[str, float] = {
    **{"sensitivity": 6, "step times": 4, "ablation": 2},
    **{"breakdown": 1, "scaling": 1, "code alone": 1, "lengths": 1, "32B rollout": 1},
    **{"adaptive timeout": 1, "stream trainer": 0.5},
}
"""Weight of each group of facts, which its facts share."""
HUBER = math.log(1.25)
DIFFERENCE = math.log(1.1)
"""Step of a constant's logarithm over which derivatives are taken: sandbox workers are whole."""
SHARES = (
    *("synchronous_judge_share", "streamed_share", "train_utilization", "longer_share"),
    *("lucky_share", "hard_prompts", "hard_prompt_cap_probability", "within_prompt_correlation"),
)
"""Constants that cannot be more than 1."""
BEFORE: Constants = {name: value for name, (value, _, _) in PUBLISHED["constants"].items()}
"""World A of the blind predictions; B had 8 % of hard prompts."""
SOURCES = {name: (unit, source) for name, (_, unit, source) in PUBLISHED["constants"].items()}
"""Unit, and what holds each constant most: all are fitted to everything at once."""

Vector = NDArray[np.float64]
FACTS = facts()
SENSITIVITY_FACTS = [fact for fact in FACTS if fact.group == "sensitivity"]
SIMS = sims_of(FACTS)


def _matters(name: str, sim: Sim) -> bool:
    """Whether the constant can change what is read off the simulation."""
    rollout_alone = any("calls_per_s=1.0e+9" in override for override in sim.overrides)
    if name.startswith("train_fixed_s"):
        return name.endswith(sim.set_up) and not rollout_alone
    if name == "judge_calls_per_s" and any(o.startswith("rewards=[") for o in sim.overrides):
        return False
    rewards = ("judge_calls_per_s", "synchronous_judge_share", "sandbox_workers")
    return not (rollout_alone and name in (*rewards, "train_utilization", "streamed_share"))


class Residuals:
    """Log errors of all facts at given constants; simulations are kept."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool
        self._kept: dict[Any, Outcome] = {}

    def __call__(self, constants: Constants) -> Vector:
        keys = {sim: self._key(sim, constants) for sim in SIMS}
        missing = [sim for sim in SIMS if keys[sim] not in self._kept]
        found = run_all(self._pool, missing, constants, seeds=(0,), fitting=True)
        self._kept.update({keys[sim]: outcome for sim, outcome in found.items()})
        outcomes = {sim: self._kept[key] for sim, key in keys.items()}
        return np.array([math.log(f.simulated(outcomes) / f.published) for f in FACTS])

    def _key(self, sim: Sim, constants: Constants) -> Any:
        return sim, tuple(value for name, value in constants.items() if _matters(name, sim))


def weights() -> Vector:
    """Weight of each fact; they add up to 1."""
    sizes = {group: sum(f.group == group for f in FACTS) for group in WEIGHTS}
    given = np.array([WEIGHTS[fact.group] / sizes[fact.group] for fact in FACTS])
    shares: Vector = given / given.sum()
    return shares


def loss(errors: Vector) -> float:
    """Weighted mean of the squared log errors, linear beyond `HUBER`."""
    size = np.abs(errors)
    each = np.where(size <= HUBER, size**2, HUBER * (2 * size - HUBER))
    return float(weights() @ each)


def moved(constants: Constants, names: Sequence[str], step: Vector) -> Constants:
    """The constants times exp(step), in their bounds."""
    found = dict(constants)
    for name, by in zip(names, step.tolist(), strict=True):
        found[name] *= math.exp(by)
        if name in SHARES:
            found[name] = min(found[name], 1.0)
    return found


def fit(residuals: Residuals, start: Constants, names: Sequence[str], seconds: float) -> Constants:
    """The best constants found in so many seconds."""
    end = time.monotonic() + seconds
    best, errors = dict(start), residuals(start)
    print(f"{loss(errors):.5f} at the start", flush=True)
    slopes, fresh, damping = None, False, 0.03
    while time.monotonic() < end:
        if slopes is None:
            slopes, fresh = _slopes(residuals, best, errors, names), True
        # Weights of a squared error that has the slope of the Huber loss.
        each = weights() * np.minimum(1.0, HUBER / np.maximum(np.abs(errors), 1e-9))
        normal = slopes.T @ (each[:, None] * slopes)
        bent = normal + damping * (np.diag(np.diag(normal)) + 1e-4 * np.eye(len(names)))
        step = np.clip(np.linalg.solve(bent, -slopes.T @ (each * errors)), -0.5, 0.5)
        tried = moved(best, names, step)
        taken = np.array([math.log(tried[name] / best[name]) for name in names])
        if not np.abs(taken).max() > 1e-3:
            break
        new = residuals(tried)
        # Broyden: the derivatives explain what the step did.
        slopes = slopes + np.outer(new - errors - slopes @ taken, taken) / (taken @ taken)
        gain = loss(errors) - loss(new)
        told = {name: float(f"{value:.4g}") for name, value in tried.items()}
        print(f"{loss(new):.5f} damping {damping:.3g} {told}", flush=True)
        if gain > 0:
            best, errors, damping, fresh = tried, new, damping / 3, False
            slopes = slopes if gain > 0.02 * loss(errors) else None
        else:
            damping *= 5
            if damping > 100:
                break
            slopes = slopes if fresh else None
    return best


def _slopes(
    residuals: Residuals, constants: Constants, errors: Vector, names: Sequence[str]
) -> Vector:
    """(facts, names), derivatives of the errors by the logarithms of the constants."""
    columns = []
    for name in names:
        # Downwards where the bound is near.
        sign = -1 if name in SHARES and constants[name] > 0.9 else 1
        by = sign * DIFFERENCE
        columns.append((residuals(moved(constants, [name], np.array([by]))) - errors) / by)
    return np.stack(columns, axis=1)


def by_group(errors: Vector) -> dict[str, float]:
    """Error factors."""
    return {
        group: round(
            error_factor(
                e for e, f in zip(errors.tolist(), FACTS, strict=True) if f.group == group
            ),
            4,
        )
        for group in WEIGHTS
    }


def main(search: float = 0.0, jobs: int = 1, keep: Sequence[str] = ()) -> dict[str, Any] | None:
    """`search`: look for better constants for so many seconds instead, but for those to `keep`."""
    start = shipped()
    with ProcessPoolExecutor(jobs) as pool:
        residuals = Residuals(pool)
        if search:
            found = fit(residuals, start, [name for name in start if name not in keep], search)
            for name, value in found.items():
                print(f"{name:<30} {value:<10.4g} {SOURCES[name][0]}")
            print(by_group(residuals(found)))
            return None
        worlds = {"A": BEFORE, "B": BEFORE | {"hard_prompts": 0.08}, "shipped": start}
        errors = {world: residuals(constants) for world, constants in worlds.items()}
        read = {
            world: table(SENSITIVITY_FACTS, run_all(pool, sims_of(SENSITIVITY_FACTS), constants))
            for world, constants in worlds.items()
            if world != "shipped"
        }
    return {
        **{"constants": start, "before": BEFORE, "weights": dict(WEIGHTS)},
        "loss": {world: round(loss(found), 6) for world, found in errors.items()},
        "error_factors": {world: by_group(found) for world, found in errors.items()},
        # With the constants of the blind predictions, the columns read as the three set-ups.
        "sensitivity": {
            world: {row["fact"]: row["simulated"] for row in rows} for world, rows in read.items()
        },
        "sensitivity_error_factors": {
            world: error_factors(rows)["all"] for world, rows in read.items()
        },
    }


if __name__ == "__main__":
    bench(main)
