"""Fits a `LengthModel` to what launches have shown, samples that were stopped early included.

Every fresh prompt is launched in a race; some prompts are launched again. What a launch shows are
the lengths of samples that finished and, for those that were stopped, that they would have been
longer. Whether a prompt is launched again depends on nothing but what its first launch showed, so
all launches of a prompt may be put into one likelihood as they are, with no correction for how they
came about (they are *missing at random*). Kaplan-Meier on all samples together is not valid: a
sample is stopped because its siblings finished, and siblings are alike.

What makes siblings alike is modelled by a few classes of prompts, each with a length distribution
of its own over bins; given the class, the samples of a prompt are independent. A class may have a
twin of *hard* prompts: the same lengths, but now and then a response goes astray and gets another
length, as a rule the cap. (Without twins a few classes could tell slow prompts from fast ones, or
hard from easy ones, but not both, and the mean length would come out up to 30 % too large.) The fit
is the closed-form EM of such a mixture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollpacker.core.lengths.bins import (
    FloatArray,
    bin_starts,
    normal_scores,
    share_between,
)
from rollpacker.core.lengths.counts import BLOCK, LengthCounts, PromptLengths
from rollpacker.core.lengths.model import TINY, LengthModel
from rollpacker.core.portable import (
    dot,
    exps,
    logs,
    mean,
    mixed,
    normal_cdfs,
    normal_quantiles,
    to_grid,
    total,
    total_of,
)

PRIOR_SHARE = 0.005
"""Size of the prior on the classes' lengths, in imagined samples per observed sample. It steadies
the tail of a class with few long responses, and is too small to matter elsewhere."""
PRIOR_EVEN = 0.01
"""Share of the prior that is spread evenly over all bins, so that none is ruled out for good."""
PRIOR_PROMPTS = 1.0
"""Number of imagined prompts added to every class, and of imagined samples added to stray responses
(unlike their class), so that neither dies out: a later policy may have them again."""

START_CORRELATIONS = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9)
START_HARD_SHARE = 0.05
START_STRAY_RATE = 0.15
START_STRAY_TAIL = 0.02
"""Share of all responses, the longest ones, that count as stray (of another length than their
prompt's class would give them) at the start of a fit."""
MIN_STRAY_RATE, MAX_STRAY_RATE = 0.01, 0.5
SETTLING_ITERATIONS = 30
"""Iterations of a fit from scratch after which its prior is computed again from the fitted classes.
At first it comes from the lengths of all prompts together, which are biased."""

COPULA_NODES = 8
"""Number of points, in each class of prompts, over which the class's length distribution is
averaged when it is made from a Gaussian copula."""

STRUCTURES = ((5, True), (12, False))
"""Structures from which a fit chooses, each as a number of classes of prompts and whether every
class has a twin whose responses go astray (get another length) now and then: few classes with
twins, or many without, as where length depends on the task and hardly on luck."""


def choose_length_model(
    prompts: Sequence[PromptLengths],
    *,
    cap: int,
    start: LengthModel | None = None,
    max_iterations: int = 150,
) -> LengthModel:
    """Fits each of `STRUCTURES` by `fit_length_model`, and returns the model with the highest log
    likelihood minus its number of parameters (Akaike's criterion). `start`: an earlier fit, whose
    structure alone is fitted again. None: all structures are."""
    if start is not None:
        twins = start.stray_rate > 0
        return fit_length_model(
            prompts,
            cap=cap,
            num_classes=start.class_weights.size // (1 + twins),
            hard_prompts=twins,
            start=start,
            max_iterations=max_iterations,
        )
    models = [
        fit_length_model(
            prompts, cap=cap, num_classes=num, hard_prompts=hard, max_iterations=max_iterations
        )
        for num, hard in STRUCTURES
    ]
    return max(models, key=lambda model: model.objective - model.num_parameters)


def fit_length_model(
    prompts: Sequence[PromptLengths],
    *,
    cap: int,
    num_classes: int = 5,
    hard_prompts: bool = True,
    start: LengthModel | None = None,
    max_iterations: int = 150,
    tolerance: float = 1e-6,
) -> LengthModel:
    """Maximum a posteriori fit of `num_classes` classes to all launches of `prompts`. With
    `hard_prompts` every class has a twin of prompts whose responses go astray now and then. `start`
    is an earlier fit, with the same cap and classes, to go on from; without it the EM starts from
    the one of a few Gaussian copulas that explains the prompts best. It ends after
    `max_iterations`, or when an iteration adds less than `tolerance` per sample to the objective.
    Raises `ValueError` if no response is complete, if a length lies below 0 or above the cap, or if
    `start` does not match."""
    if num_classes < 1:
        raise ValueError(f"a length model needs at least one class, not {num_classes}")
    data = LengthCounts.of(prompts, bin_starts(cap))
    if start is None:
        parts = _cold_start(data, num_classes, hard_prompts)
        parts, _, _ = _em(data, parts, _prior(data, parts), SETTLING_ITERATIONS, tolerance)
    else:
        _check_start(start, cap, num_classes * (1 + hard_prompts))
        parts = Mixture.of(start)
    prior = _prior(data, parts)
    parts, objective, num_iterations = _em(data, parts, prior, max_iterations, tolerance)
    return LengthModel(
        cap=cap,
        centres=data.centres,
        class_weights=parts.weights.ravel(),
        class_densities=parts.densities(),
        stray_density=parts.stray,
        stray_rate=parts.stray_rate,
        num_prompts=len(prompts),
        longest=data.longest,
        objective=objective,
        num_iterations=num_iterations,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Parameters that the EM improves. With K = 2 every class m has the twin (1, m) with density (1
    - stray_rate) * bodies[m] + stray_rate * stray; with K = 1 there are no twins."""

    weights: FloatArray
    """(K, M) share of the prompts in each class; a class has a length distribution of its own."""
    bodies: FloatArray
    """(M, B) length distribution of each class over bins, without stray responses."""
    stray: FloatArray
    """(B,) length distribution, over bins, of stray responses: those unlike their class."""
    stray_rate: float

    @classmethod
    def of(cls, model: LengthModel) -> Mixture:
        twins = 2 if model.stray_rate > 0 else 1
        return cls(
            weights=model.class_weights.reshape(twins, -1),
            bodies=model.class_densities[: model.class_weights.size // twins],
            stray=model.stray_density,
            stray_rate=model.stray_rate,
        )

    def densities(self) -> FloatArray:
        """(K * M, B) share, in each bin, of the responses of each class, twins after the others."""
        if len(self.weights) == 1:
            return self.bodies
        twins = (1 - self.stray_rate) * self.bodies + self.stray_rate * self.stray
        return np.vstack([self.bodies, twins])


def _check_start(start: LengthModel, cap: int, num_classes: int) -> None:
    if start.cap != cap or start.class_weights.size != num_classes:
        raise ValueError(
            f"cannot go on from a fit with {start.class_weights.size} classes and a cap of "
            f"{start.cap} tokens: {num_classes} classes and {cap} tokens are asked for"
        )


def _survival(densities: FloatArray, beyond: FloatArray) -> FloatArray:
    """(M, B) probability, by class and bin, that a response becomes longer than one stopped in this
    bin. `beyond` (B,): share of the bin above the length at which responses were stopped in it."""
    later = np.cumsum(densities[:, ::-1], axis=1)[:, ::-1] - densities
    return np.maximum(later, 0.0) + densities * beyond


def _em(
    data: LengthCounts, parts: Mixture, prior: FloatArray, max_iterations: int, tolerance: float
) -> tuple[Mixture, float, int]:
    least = tolerance * data.num_samples
    objective = -math.inf
    for iteration in range(max_iterations + 1):
        shares, now = _explain(data, parts, prior)
        if iteration == max_iterations or now - objective < least:
            break
        objective = now
        parts = _improve(data, shares, parts, prior)
    return parts, now, iteration


def _explain(data: LengthCounts, parts: Mixture, prior: FloatArray) -> tuple[FloatArray, float]:
    """E step: (N, C, BLOCK) probability of each class given a prompt's lengths, and the value of
    the objective (log likelihood plus log prior). `prior` (M + 1, B): number of imagined samples by
    bin, for each class and, in the last row, for stray responses."""
    densities = parts.densities()
    # One call for all rows: most of a logarithm's time here is numpy's time for a call.
    rows = np.vstack([densities, _survival(densities, data.beyond), parts.stray])
    logged, log_weights = _log(rows), _log(parts.weights)
    num_classes = len(densities)
    likely = data.log_likelihoods(logged[:num_classes], logged[num_classes:-1])
    likely += log_weights.reshape(-1, 1)
    top = likely.max(axis=1)
    shares = exps(likely - top[:, np.newaxis])
    whole = shares[:, 0].copy()
    for number in range(1, shares.shape[1]):
        whole += shares[:, number]
    shares /= whole[:, np.newaxis]
    num_in_last = data.num_prompts - (len(shares) - 1) * BLOCK
    shares[-1, :, num_in_last:] = 0.0
    per_prompt = (top + logs(whole)).ravel()[: data.num_prompts]
    log_prior = total_of(logged[: len(parts.bodies)] * prior[:-1])
    log_prior += PRIOR_PROMPTS * total_of(log_weights)
    if len(parts.weights) > 1:
        log_prior += total_of(logged[-1] * prior[-1])
    return shares, total_of(per_prompt) + log_prior


def _improve(data: LengthCounts, shares: FloatArray, parts: Mixture, prior: FloatArray) -> Mixture:
    """M step of the EM: returns the improved mixture. A stopped sample is spread over the bins
    beyond its stop in proportion to the class's density."""
    densities = parts.densities()
    ended, stopped = data.totals(shares)
    survival = np.maximum(_survival(densities, data.beyond), TINY)
    per_mass = np.where(stopped > 0, stopped / survival, 0.0)
    earlier = np.cumsum(per_mass, axis=1) - per_mass
    expected = ended + densities * (earlier + per_mass * data.beyond)
    num_classes = len(parts.bodies)
    bodies = expected[:num_classes] + prior[:-1]
    stray, rate = parts.stray, parts.stray_rate
    if len(parts.weights) > 1:
        twins = expected[num_classes:]
        from_stray = twins * (rate * stray / np.maximum(densities[num_classes:], TINY))
        bodies = bodies + twins - from_stray
        rate = total_of(from_stray) / max(total_of(twins), TINY)
        rate = min(max(rate, MIN_STRAY_RATE), MAX_STRAY_RATE)
        stray = total(from_stray, 0) + prior[-1]
        stray = stray / total_of(stray)
    num_prompts = to_grid(shares, data.num_prompts).sum(axis=(0, 2))
    weights = num_prompts.reshape(parts.weights.shape) + PRIOR_PROMPTS
    return Mixture(
        weights=weights / total_of(weights),
        bodies=bodies / total(bodies)[:, np.newaxis],
        stray=stray,
        stray_rate=rate,
    )


def _log(values: FloatArray) -> FloatArray:
    return logs(np.maximum(values, TINY))


def _fit_pooled(data: LengthCounts) -> FloatArray:
    """(B,) length distribution of all prompts together, as if they were alike, in closed form.
    Product-limit: the share of the still running samples that end in a bin, bin by bin. Samples
    stopped in a bin count as running in it with the share of the bin that lies before their stop. A
    little is added everywhere, so that no bin is ruled out."""
    everyone = np.ones((len(data.ended), 1, BLOCK))
    (ended,), (stopped,) = data.totals(everyone)
    seen = ended + stopped
    at_risk = np.cumsum(seen[::-1])[::-1] - stopped * data.beyond
    hazard = np.where(ended > 0, ended / np.maximum(at_risk, TINY), 0.0)
    survival = np.concatenate([[1.0], np.cumprod(1.0 - np.clip(hazard, 0.0, 1.0))])
    density = -np.diff(survival)
    longest = int(np.flatnonzero(ended)[-1])
    rest = np.zeros_like(density)
    rest[min(longest + 1, density.size - 1) :] = 1.0
    density += survival[-1] * rest / total_of(rest)
    density = np.maximum(density, 0.0) + 1e-2 / (density.size * max(total_of(seen), 1.0))
    return np.asarray(density / total_of(density), dtype=np.float64)


def _cold_start(data: LengthCounts, num_classes: int, hard_prompts: bool) -> Mixture:
    """Mixture to start from: equally frequent classes, cut from a copula of the pooled lengths."""
    pooled = _fit_pooled(data)
    weights = np.full((1, num_classes), 1.0 / num_classes)
    best, best_objective = None, -math.inf
    for correlation in START_CORRELATIONS:
        bodies = _copula_classes(pooled, correlation, weights[0])
        parts = Mixture(weights=weights, bodies=bodies, stray=pooled, stray_rate=0.0)
        _, objective = _explain(data, parts, np.zeros((num_classes + 1, pooled.size)))
        if objective > best_objective:
            best, best_objective = parts, objective
    assert best is not None
    if not hard_prompts:
        return best
    beyond = np.cumsum(pooled) > 1 - START_STRAY_TAIL
    stray = np.where(beyond, pooled, 1e-3 * pooled)
    return Mixture(
        weights=np.vstack([weights * (1 - START_HARD_SHARE), weights * START_HARD_SHARE]),
        bodies=best.bodies,
        stray=stray / total_of(stray),
        stray_rate=START_STRAY_RATE,
    )


def _prior(data: LengthCounts, parts: Mixture) -> FloatArray:
    """(M + 1, B) number of imagined samples (the prior) by bin, for each class and, in the last
    row, for stray responses. The classes follow a Gaussian copula that has the mixture's lengths
    over all classes and its correlation within a prompt."""
    weights = total(parts.weights, 0)
    weights = weights / total_of(weights)
    marginal = mixed(weights, parts.bodies)
    marginal = marginal / total_of(marginal)
    scores = normal_scores(marginal)
    class_means = dot(parts.bodies, scores)
    correlation = share_between(weights, class_means, marginal, scores)
    order = np.argsort(class_means, kind="stable")
    classes = np.empty_like(parts.bodies)
    classes[order] = _copula_classes(marginal, min(correlation, 0.99), weights[order])
    classes = (1 - PRIOR_EVEN) * classes + PRIOR_EVEN / marginal.size
    classes *= PRIOR_SHARE * data.num_samples / len(classes)
    return np.vstack([classes, PRIOR_PROMPTS * marginal])


def _copula_classes(marginal: FloatArray, correlation: float, weights: FloatArray) -> FloatArray:
    """(M, B) length distribution of each class in a Gaussian copula: a response has the normal
    score sqrt(rho) u + sqrt(1 - rho) e, with u the prompt's part, e its own, and rho the
    `correlation`. Classes are intervals of u that hold the shares `weights` of the prompts."""
    lower = np.cumsum(weights) - weights
    inside = (np.arange(COPULA_NODES) + 0.5) / COPULA_NODES
    places = lower[:, np.newaxis] + weights[:, np.newaxis] * inside
    nodes = normal_quantiles(np.clip(places.ravel(), 1e-9, 1 - 1e-9))
    edges = normal_quantiles(np.clip(np.cumsum(marginal)[:-1], 1e-15, 1 - 1e-15))
    scaled = edges - math.sqrt(correlation) * nodes[:, np.newaxis]
    below = normal_cdfs(scaled / math.sqrt(1 - correlation))
    ends = np.ones((nodes.size, 1))
    at_nodes = np.diff(np.hstack([0 * ends, below, ends]), axis=1)
    classes = mean(at_nodes.reshape(weights.size, COPULA_NODES, -1), 1)
    classes = np.maximum(classes, 1e-9 * marginal)
    classes *= marginal / mixed(weights, classes)  # a few nodes do not add up to it exactly
    return np.asarray(classes / total(classes)[:, np.newaxis], dtype=np.float64)
