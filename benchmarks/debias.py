"""Do the debias weights give back the policy's own lengths?

A queue of prompts with known lengths goes through tail batching with an ideal race. The core's
`Debias` sees what it sees in a real run; after 50 steps the weighted trained samples are compared
with the law that all lengths were drawn from. Lengths: the quantiles of code responses in Fig. 2a
of the RollPacker paper (arXiv 2509.21009), correlated inside a prompt by a Gaussian copula; with
hard prompts, 8 % have every response run to the cap with probability 0.15.

    python benchmarks/debias.py [--seeds 3] [--quick]
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from lab import bench
from numpy.typing import NDArray

from rollpacker.core.ids import PromptId
from rollpacker.core.lengths.counts import PromptLengths
from rollpacker.core.lengths.debias import Debias
from rollpacker.core.lengths.fit import choose_length_model
from rollpacker.core.lengths.weights import density_weights, effective_sample_size
from tests.core.lengths.product_limit import kaplan_meier_mean

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

CAP = 16384
CODE_QUANTILES = {
    **{0.0: 100, 0.01: 196, 0.05: 286, 0.1: 349, 0.2: 443, 0.25: 481, 0.3: 517, 0.4: 590},
    **{0.5: 663, 0.6: 748, 0.7: 864, 0.75: 945, 0.8: 1062, 0.85: 1263, 0.9: 1667, 0.92: 1952},
    **{0.94: 2433, 0.95: 2815, 0.96: 3472, 0.97: 4053, 0.991: CAP},
}
"""Tokens. 0.9 % are at the cap; the lowest length is a guess; log-linear in between."""
HARD_CAP_PROBABILITY = 0.15
PROMPTS_PER_STEP = 128
SAMPLES_PER_PROMPT = 8
NUM_STEPS = 50

CORRELATIONS = (0.0, 0.05, 0.2, 0.4)
HARD_SHARES = (0.0, 0.08)
FACTORS = ((1.25, 1.25), (1.25, 1.125), (1.125, 1.125), (1.5, 1.25))
QUANTILES = (0.25, 0.5, 0.75, 0.9, 0.95)

MAX_MEAN_ERROR = 0.05
MAX_QUANTILE_ERROR = 0.10
MIN_EFFECTIVE = 0.7

NORMAL = statistics.NormalDist()
_SCORES = np.linspace(-6, 6, 6001)
_RANKS = np.array([NORMAL.cdf(float(score)) for score in _SCORES])


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Where lengths come from."""

    correlation: float
    hard_share: float

    def draw_prompts(self, rng: np.random.Generator, num: int) -> list[tuple[float, bool]]:
        """What makes a prompt long (a normal score), and whether it is hard."""
        scores = rng.standard_normal(num).tolist()
        hard = (rng.random(num) < self.hard_share).tolist()
        return list(zip(scores, hard, strict=True))

    def draw_lengths(
        self, rng: np.random.Generator, prompts: Sequence[tuple[float, bool]], num: int
    ) -> IntArray:
        """(P, num) lengths in tokens of `num` responses to each prompt."""
        of_prompt = np.array([score for score, _ in prompts])[:, np.newaxis]
        hard = np.array([is_hard for _, is_hard in prompts])[:, np.newaxis]
        own = rng.standard_normal((len(prompts), num))
        scores = math.sqrt(self.correlation) * of_prompt + math.sqrt(1 - self.correlation) * own
        lengths = code_lengths(np.interp(scores, _SCORES, _RANKS))
        astray = hard & (rng.random((len(prompts), num)) < HARD_CAP_PROBABILITY)
        return np.where(astray, CAP, lengths)

    def law(self) -> tuple[IntArray, FloatArray]:
        """Lengths of the policy's own responses, and the share of each."""
        ranks = (np.arange(400_000) + 0.5) / 400_000
        capped = self.hard_share * HARD_CAP_PROBABILITY
        shares = np.full(ranks.size, (1 - capped) / ranks.size)
        return np.append(code_lengths(ranks), CAP), np.append(shares, capped)


def code_lengths(ranks: FloatArray) -> IntArray:
    logs = np.interp(ranks, list(CODE_QUANTILES), np.log(list(CODE_QUANTILES.values())))
    return np.minimum(np.ceil(np.exp(logs)), CAP).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One launch of a prompt, as the core sees it."""

    prompt: int
    finished: list[int]
    stopped: list[int]
    settled: bool
    """The prompt was done; it was not deferred."""


class Queue:
    """Tail batching with an ideal race."""

    def __init__(self, world: World, factors: tuple[float, float], seed: int) -> None:
        self._world = world
        self._num_started = math.ceil(factors[0] * PROMPTS_PER_STEP - 1e-9)
        self._num_samples = math.ceil(factors[1] * SAMPLES_PER_PROMPT - 1e-9)
        self._rng = np.random.default_rng(seed)
        self._prompts: list[tuple[float, bool]] = []
        self._deferred: list[int] = []

    def step(self) -> tuple[list[Shown], list[int]]:
        """Run one round: the launches as they are shown, and the lengths that are trained on."""
        return self._long() if len(self._deferred) >= PROMPTS_PER_STEP else self._short()

    def _long(self) -> tuple[list[Shown], list[int]]:
        names = self._deferred[:PROMPTS_PER_STEP]
        del self._deferred[:PROMPTS_PER_STEP]
        prompts = [self._prompts[name] for name in names]
        rows = self._world.draw_lengths(self._rng, prompts, SAMPLES_PER_PROMPT).tolist()
        shown = [
            Shown(prompt=name, finished=row, stopped=[], settled=True)
            for name, row in zip(names, rows, strict=True)
        ]
        return shown, [length for row in rows for length in row]

    def _short(self) -> tuple[list[Shown], list[int]]:
        needed = SAMPLES_PER_PROMPT
        prompts = self._world.draw_prompts(self._rng, self._num_started)
        rows = np.sort(self._world.draw_lengths(self._rng, prompts, self._num_samples), axis=1)
        done_at = rows[:, needed - 1]
        order = np.argsort(done_at, kind="stable")
        done = set(order[:PROMPTS_PER_STEP].tolist())
        end = int(done_at[order[PROMPTS_PER_STEP - 1]])
        shown, trained = [], []
        for index, row in enumerate(rows.tolist()):
            name = len(self._prompts)
            self._prompts.append(prompts[index])
            if index in done:
                kept, stop = row[:needed], row[needed - 1]
                trained += kept
            else:
                kept, stop = [n for n in row if n <= end][: needed - 1], end
                self._deferred.append(name)
            stopped = [stop] * (len(row) - len(kept))
            shown.append(Shown(prompt=name, finished=kept, stopped=stopped, settled=index in done))
        return shown, trained


def run_cell(world: World, factors: tuple[float, float], seed: int) -> dict[str, Any]:
    """One seed of one setting. All means are over the policy's own mean."""
    lengths, shares = world.law()
    own_mean = float(lengths @ shares)
    own_quantiles = weighted_quantiles(lengths, shares)
    queue = Queue(world, factors, seed)
    debias = Debias(cap=CAP)
    launches: list[Shown] = []
    trained: list[int] = []
    issued: list[float] = []
    issued_for: list[int] = []
    for _ in range(NUM_STEPS):
        shown, kept = queue.step()
        launches += shown
        trained += kept
        for launch in shown:
            debias.observe(PromptId("code", 0, launch.prompt), launch.finished, launch.stopped)
        weights = debias.step(kept)
        if weights is not None:
            issued += weights
            issued_for += kept
    model = debias.window.model
    moments = debias.weigh(trained)
    assert model is not None and moments is not None, "no weights after all steps"
    by_bin = density_weights(model, model.counts(trained))
    density = by_bin[model.bins(trained)]
    row: dict[str, Any] = {
        "trained": statistics.fmean(trained) / own_mean,
        "estimated": model.mean() / own_mean,
        "correlation": model.within_prompt_correlation(),
        "kaplan_meier_all": _kaplan_meier(launches) / own_mean,
        "kaplan_meier_settled": _kaplan_meier([s for s in launches if s.settled]) / own_mean,
        "moments_as_issued": _mean(issued_for, np.array(issued)) / own_mean,
    }
    for name, weights_N in (("moments", np.array(moments)), ("density", density)):
        got = weighted_quantiles(np.array(trained), weights_N)
        row[name] = {
            "mean": _mean(trained, weights_N) / own_mean,
            "quantile_errors": (got / own_quantiles - 1).tolist(),
            "effective_sample_size": effective_sample_size(weights_N),
            "max_weight": float(weights_N.max()),
        }
    return row


def _kaplan_meier(launches: Sequence[Shown]) -> float:
    finished = list(itertools.chain.from_iterable(launch.finished for launch in launches))
    stopped = list(itertools.chain.from_iterable(launch.stopped for launch in launches))
    return kaplan_meier_mean(finished, stopped, CAP)


def _mean(lengths: Sequence[int], weights: FloatArray) -> float:
    return float(weights @ np.array(lengths) / weights.sum())


def weighted_quantiles(lengths: IntArray, weights: FloatArray) -> FloatArray:
    order = np.argsort(lengths, kind="stable")
    cumulative = np.cumsum(weights[order]) / weights.sum()
    places = np.searchsorted(cumulative, QUANTILES)
    return lengths[order][places].astype(np.float64)


def summarize(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over the seeds, and the single seed that is furthest off."""
    row: dict[str, Any] = {
        key: statistics.fmean(cell[key] for cell in cells)
        for key, value in cells[0].items()
        if isinstance(value, float)
    }
    for method in ("moments", "density"):
        parts = [cell[method] for cell in cells]
        means = [part["mean"] for part in parts]
        errors = np.array([part["quantile_errors"] for part in parts])
        effective = [part["effective_sample_size"] for part in parts]
        row[method] = {
            "mean": statistics.fmean(means),
            "worst_seed_mean": max(means, key=lambda mean: abs(mean - 1)),
            "quantile_errors": errors.mean(axis=0).tolist(),
            "worst_seed_quantile_error": float(np.abs(errors).max()),
            "effective_sample_size": statistics.fmean(effective),
            "worst_seed_effective_sample_size": min(effective),
            "max_weight": max(part["max_weight"] for part in parts),
        }
    return row


def misses(row: dict[str, Any], method: str) -> list[str]:
    """The bounds that the mean over the seeds misses, in words."""
    part = row[method]
    found = []
    if abs(part["mean"] - 1) > MAX_MEAN_ERROR:
        found.append(f"mean {part['mean']:.3f} of the policy's own")
    for q, error in zip(QUANTILES, part["quantile_errors"], strict=True):
        if abs(error) > MAX_QUANTILE_ERROR:
            found.append(f"quantile {q:g} off by {error:+.1%}")
    if part["effective_sample_size"] < MIN_EFFECTIVE:
        found.append(f"effective sample size {part['effective_sample_size']:.3f}")
    return found


def measure_cost(seed: int = 0) -> dict[str, float]:
    """Processor seconds of the fit and of a step, with 160 prompts started per short round."""
    queue = Queue(World(correlation=0.05, hard_share=0.08), (1.25, 1.25), seed)
    debias = Debias(cap=CAP)
    by_prompt: dict[int, PromptLengths] = {}
    step_s: list[float] = []
    for number in range(100):
        shown, trained = queue.step()
        if number < 50:
            for launch in shown:
                before = by_prompt.get(launch.prompt, PromptLengths())
                by_prompt[launch.prompt] = PromptLengths(
                    finished=(*before.finished, *launch.finished),
                    stopped=(*before.stopped, *launch.stopped),
                )
        began = time.process_time()
        for launch in shown:
            debias.observe(PromptId("code", 0, launch.prompt), launch.finished, launch.stopped)
        debias.step(trained)
        step_s.append(time.process_time() - began)
    prompts = list(by_prompt.values())
    began = time.process_time()
    model = choose_length_model(prompts, cap=CAP)
    cold_s = time.process_time() - began
    began = time.process_time()
    choose_length_model(prompts, cap=CAP, start=model, max_iterations=8)
    warm_s = time.process_time() - began
    return {
        "prompts": len(prompts),
        "cold_fit_s": cold_s,
        "cold_iterations": model.num_iterations,
        "warm_fit_s": warm_s,
        "first_50_steps_mean_s": statistics.fmean(step_s[:50]),
        "later_steps_mean_s": statistics.fmean(step_s[50:]),
        "later_steps_median_s": statistics.median(step_s[50:]),
        "later_steps_max_s": max(step_s[50:]),
    }


def main(seeds: int = 3, quick: bool = False) -> dict[str, Any]:
    """`seeds`: per setting."""
    settings = list(itertools.product(HARD_SHARES, CORRELATIONS, FACTORS))
    numbers = range(1 if quick else seeds)
    rows = []
    for hard_share, rho, factors in settings[:: len(FACTORS) + 1 if quick else 1]:
        world = World(correlation=rho, hard_share=hard_share)
        found = summarize([run_cell(world, factors, seed) for seed in numbers])
        name = f"{factors[0]:g}, {factors[1]:g}"
        rows.append({"hard_share": hard_share, "rho": rho, "factors": name, **found})
        print(rows[-1], flush=True)
    missed = {
        method: [
            f"hard {row['hard_share']:g}, rho {row['rho']:g}, factors {row['factors']}: {miss}"
            for row in rows
            for miss in misses(row, method)
        ]
        for method in ("moments", "density")
    }
    bounds = {
        **{"mean": MAX_MEAN_ERROR, "quantiles_25_to_95": MAX_QUANTILE_ERROR},
        "effective_sample_size": MIN_EFFECTIVE,
    }
    workload = {
        **{"prompts_per_step": PROMPTS_PER_STEP, "samples_per_prompt": SAMPLES_PER_PROMPT},
        **{"steps": NUM_STEPS, "cap": CAP, "seeds": len(numbers)},
        "quantiles": {str(q): length for q, length in CODE_QUANTILES.items()},
        "hard_cap_probability": HARD_CAP_PROBABILITY,
    }
    told = {"workload": workload, "bounds": bounds, "missed": missed}
    return {**told, "cost": measure_cost(), "rows": rows}


if __name__ == "__main__":
    bench(main, holds=lambda found: not found["missed"]["moments"])
