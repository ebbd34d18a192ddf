"""The policy's own length distribution, from samples that were stopped early.

Every fresh prompt is launched in a race; some prompts are launched again. What a launch shows are
the lengths of samples that finished and, for those that were stopped, that they would have been
longer. Whether a prompt is launched again depends on nothing but what its first launch showed, so
all launches of a prompt may be put into one likelihood as they are, with no correction for how they
came about (they are *missing at random*). Kaplan-Meier on all samples together is not valid:
a sample is stopped because its siblings finished, and siblings are alike.

What makes siblings alike is modelled by a few classes of prompts, each with a length distribution
of its own over bins; given the class, the samples of a prompt are independent. A class may have a
twin of *hard* prompts: the same lengths, but now and then a response goes astray and gets another
length, as a rule the cap. (A few free classes alone would have to choose: those that tell slow from
fast prompts cannot also tell hard from easy ones, and the mean comes out up to 30 % too large.) The
fit is the closed-form EM of such a mixture.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

BINS_PER_OCTAVE = 8
"""A bin is 9 % wide, and never narrower than one token."""
PRIOR_SHARE = 0.005
"""The prior of the classes' distributions is worth so many samples per sample seen: enough to keep
the tail of a class that is seldom launched again from running wild, too little to matter
elsewhere."""
PRIOR_EVEN = 0.01
"""This part of it lies evenly on all bins, so that none is ruled out for good."""
PRIOR_PROMPTS = 1.0
"""Prompts that every class is given, and samples that stray ones are: what died out under one
policy can come back under the next."""

START_CORRELATIONS = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9)
START_HARD_SHARE = 0.05
START_STRAY_RATE = 0.15
START_STRAY_TAIL = 0.02
"""At the start responses go astray within this upper part of all lengths."""
MIN_STRAY_RATE, MAX_STRAY_RATE = 0.01, 0.5
SETTLING_ITERATIONS = 30
"""From a cold start; then the prior, so far from the biased pooled distribution, is made anew."""

COPULA_NODES = 8
"""Points of a class at which a copula is averaged."""
BLOCK = 128
"""Prompts per matrix product: so small a product is done by one thread, so the fit does not depend
on how many threads there are (nor would more of them make it faster)."""
TINY = 1e-300


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLengths:
    """What all launches of one prompt have shown, in tokens."""

    finished: tuple[int, ...] = ()
    """Lengths of complete responses."""
    stopped: tuple[int, ...] = ()
    """What stopped ones had reached: each would have become longer."""


def bin_starts(cap: int) -> IntArray:
    """First length of every bin, (B,), for lengths of 1 to `cap` tokens.

    The bins grow by 2 ** (1 / BINS_PER_OCTAVE); the last one holds `cap` alone, because there the
    distribution has a jump.
    """
    if cap < 2:
        raise ValueError(f"the cap must be at least 2 tokens, not {cap}")
    num_bins = math.ceil(math.log2(cap) * BINS_PER_OCTAVE) + 1
    starts = np.ceil(2.0 ** (np.arange(num_bins) / BINS_PER_OCTAVE) - 1e-9).astype(np.int64)
    return np.append(np.unique(starts[starts < cap]), cap)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LengthModel:
    """A fitted distribution: C classes of prompts over B bins of length."""

    starts: IntArray
    """(B,) first length of every bin, in tokens. The last one is the cap."""
    centres: FloatArray
    """(B,) mean length of the responses in every bin, in tokens."""
    class_weights: FloatArray
    """(C,) share of the prompts."""
    class_densities: FloatArray
    """(C, B) share of a class's responses; rows add up to 1."""
    stray_density: FloatArray
    """(B,) lengths of responses that went astray."""
    stray_rate: float
    """Share of the responses to hard prompts that go astray. The second half of the classes are the
    hard twins of the first; 0.0: there are no twins."""
    num_prompts: int
    """Prompts that were fitted to."""
    longest: int
    """Longest complete response that was fitted to, in tokens."""
    objective: float
    """Log likelihood of the prompts plus the log prior. No iteration makes it smaller."""
    num_iterations: int

    @property
    def cap(self) -> int:
        return int(self.starts[-1])

    @property
    def density(self) -> FloatArray:
        """(B,) share of the policy's own responses in every bin."""
        return self.class_weights @ self.class_densities

    @property
    def num_parameters(self) -> int:
        """Numbers that a fit of this structure finds."""
        num_bins = self.starts.size
        if not self.stray_rate:
            return int(self.class_weights.size * num_bins)
        return int((self.class_weights.size // 2 + 1) * num_bins + self.class_weights.size)

    def mean(self) -> float:
        """The policy's own mean length in tokens."""
        return float(self.density @ self.centres)

    def quantile(self, q: float) -> float:
        """Length in tokens that a share `q` of the policy's own responses does not exceed."""
        if not 0 <= q <= 1:
            raise ValueError(f"a quantile's share lies between 0 and 1, not {q}")
        return float(self._at(np.array([q]))[0])

    def unseen(self) -> float:
        """Own mass beyond the bin of the longest complete response. Only stopped samples tell that
        it exists; nothing tells where it lies."""
        return float(self.density[int(self.bins([self.longest])[0]) + 1 :].sum())

    def bins(self, lengths: ArrayLike) -> IntArray:
        """Bin of each length. Raises `ValueError` for a length below 0 or above the cap; an empty
        response is in the first bin."""
        values = np.asarray(lengths, dtype=np.int64)
        _check_lengths(values, self.cap)
        return _bins(self.starts, values)

    def counts(self, lengths: ArrayLike) -> FloatArray:
        """(B,) how many of `lengths` lie in every bin."""
        return np.bincount(self.bins(lengths), minlength=self.starts.size).astype(np.float64)

    def tail_share(self, lengths: ArrayLike, q: float = 0.95) -> float:
        """How much of the policy's own tail beyond its quantile `q` is among `lengths`: their share
        of such lengths over the policy's own. 1.0: all of it, 0.0: none."""
        return self.tail_share_of(self.counts(lengths), q)

    def tail_share_of(self, counts: FloatArray, q: float = 0.95) -> float:
        """The same of `counts` (B,) of lengths per bin."""
        if not counts.sum():
            raise ValueError("no lengths to compare with the policy's own")
        first = int(self.bins([self.quantile(q)])[0])
        own = self.density[first:].sum()
        return float(counts[first:].sum() / counts.sum() / own)

    def within_prompt_correlation(self) -> float:
        """Correlation between two responses to one prompt, of the lengths' normal scores (the
        standard normal quantile of a length's rank): the `rho` of a Gaussian copula, between 0
        and 1."""
        scores = _scores(self.density)
        class_means = self.class_densities @ scores
        return _share_between(self.class_weights, class_means, self.density, scores)

    def sample(self, rng: np.random.Generator, num_prompts: int, num_samples: int) -> IntArray:
        """(P, R) lengths in tokens of R responses to each of P prompts."""
        num_classes = self.class_weights.size
        classes = rng.choice(num_classes, size=num_prompts, p=self.class_weights)
        cumulative = np.cumsum(self.class_densities, axis=1)
        cumulative /= cumulative[:, -1:]
        lengths = np.empty((num_prompts, num_samples), dtype=np.int64)
        draws = rng.random((num_prompts, num_samples))
        places = rng.random((num_prompts, num_samples))
        widths = self._widths()
        for index in range(num_classes):
            chosen = classes == index
            bins = np.searchsorted(cumulative[index], draws[chosen], side="right")
            inside = (places[chosen] * widths[bins]).astype(np.int64)
            lengths[chosen] = self.starts[bins] + inside
        return lengths

    def to_plain(self) -> dict[str, Any]:
        """As plain lists and numbers, exactly, for a checkpoint."""
        return {
            "cap": self.cap,
            "centres": self.centres.tolist(),
            "class_weights": self.class_weights.tolist(),
            "class_densities": self.class_densities.tolist(),
            "stray_density": self.stray_density.tolist(),
            "stray_rate": self.stray_rate,
            "num_prompts": self.num_prompts,
            "longest": self.longest,
            "objective": self.objective,
            "num_iterations": self.num_iterations,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> LengthModel:
        return cls(
            starts=bin_starts(plain["cap"]),
            centres=np.array(plain["centres"], dtype=np.float64),
            class_weights=np.array(plain["class_weights"], dtype=np.float64),
            class_densities=np.array(plain["class_densities"], dtype=np.float64),
            stray_density=np.array(plain["stray_density"], dtype=np.float64),
            stray_rate=plain["stray_rate"],
            num_prompts=plain["num_prompts"],
            longest=plain["longest"],
            objective=plain["objective"],
            num_iterations=plain["num_iterations"],
        )

    def _widths(self) -> IntArray:
        return np.diff(np.append(self.starts, self.cap + 1))

    def _at(self, shares: FloatArray) -> FloatArray:
        """Lengths at cumulative `shares`; inside a bin all lengths are equally frequent."""
        density = self.density
        cumulative = np.cumsum(density)
        bins = np.searchsorted(cumulative, shares * cumulative[-1] - 1e-12, side="left")
        bins = np.minimum(bins, self.starts.size - 1)
        rest = shares * cumulative[-1] - (cumulative[bins] - density[bins])
        place = np.clip(rest / np.maximum(density[bins], TINY), 0.0, 1.0)
        widths = self._widths()[bins]
        inside = np.minimum(np.floor(place * widths), widths - 1)
        return np.asarray(self.starts[bins] + inside, dtype=np.float64)


STRUCTURES = ((5, True), (12, False))
"""(classes, with hard twins) that a fit chooses from: few kinds of prompts, some of which go astray
now and then; or many kinds, as where the length is the task's and hardly luck."""


def choose_length_model(
    prompts: Sequence[PromptLengths],
    *,
    cap: int,
    start: LengthModel | None = None,
    max_iterations: int = 150,
) -> LengthModel:
    """`fit_length_model` with the structure that explains the prompts best, a parameter weighing
    against it by one unit of log likelihood (Akaike's criterion); with a `start`, its
    structure."""
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
    """Maximum a posteriori fit of `num_classes` classes to all launches of `prompts`.

    With `hard_prompts` every class has a twin of prompts whose responses go astray now and then.

    `start` is an earlier fit with the same cap and classes to go on from; without one the EM starts
    from a Gaussian copula, whose correlation is the one of a few that explains the prompts best. It
    ends after `max_iterations`, or when one adds less than `tolerance` per sample to the objective.

    Raises `ValueError` if no response is complete, if a length lies below 0 or above the cap, or if
    `start` has another cap or other classes.
    """
    if num_classes < 1:
        raise ValueError(f"a length model needs at least one class, not {num_classes}")
    data = _Data.of(prompts, bin_starts(cap))
    if start is None:
        parts = _cold_start(data, num_classes, hard_prompts)
        parts, _, _ = _em(data, parts, _prior(data, parts), SETTLING_ITERATIONS, tolerance)
    else:
        _check_start(start, cap, num_classes * (1 + hard_prompts))
        parts = _Parts.of(start)
    prior = _prior(data, parts)
    parts, objective, num_iterations = _em(data, parts, prior, max_iterations, tolerance)
    return LengthModel(
        starts=data.starts,
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
class _Parts:
    """What the EM improves. With K = 2 every class m has the twin (1, m) with density
    (1 - stray_rate) * bodies[m] + stray_rate * stray; with K = 1 there are no twins."""

    weights: FloatArray
    """(K, M) shares of the prompts."""
    bodies: FloatArray
    """(M, B)"""
    stray: FloatArray
    """(B,)"""
    stray_rate: float

    @classmethod
    def of(cls, model: LengthModel) -> _Parts:
        twins = 2 if model.stray_rate > 0 else 1
        return cls(
            weights=model.class_weights.reshape(twins, -1),
            bodies=model.class_densities[: model.class_weights.size // twins],
            stray=model.stray_density,
            stray_rate=model.stray_rate,
        )

    def densities(self) -> FloatArray:
        """(K * M, B)"""
        if len(self.weights) == 1:
            return self.bodies
        twins = (1 - self.stray_rate) * self.bodies + self.stray_rate * self.stray
        return np.vstack([self.bodies, twins])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Data:
    """The prompts as counts, in N blocks of BLOCK prompts, of which the last is filled up with
    prompts that have no samples."""

    starts: IntArray
    centres: FloatArray
    ended: FloatArray
    """(N, BLOCK, E) complete responses per prompt and bin, ..."""
    ended_bins: IntArray
    """(E,) ... of those bins that have any."""
    stopped: FloatArray
    """(N, BLOCK, S) stopped ones."""
    stopped_bins: IntArray
    """(S,)"""
    beyond: FloatArray
    """(B,) mean share of a bin that lies beyond where samples were stopped in it."""
    longest: int
    num_prompts: int

    @property
    def num_samples(self) -> float:
        return float(self.ended.sum() + self.stopped.sum())

    def log_likelihoods(self, log_density: FloatArray, log_survival: FloatArray) -> FloatArray:
        """(N, C, BLOCK) log probability of what each prompt has shown under each class, from the
        logs (C, B) of the probabilities that a sample ends in a bin or outlives a stop there."""
        logs = log_density[:, self.ended_bins] @ self.ended.swapaxes(1, 2)
        logs += log_survival[:, self.stopped_bins] @ self.stopped.swapaxes(1, 2)
        return np.asarray(logs, dtype=np.float64)

    def totals(self, shares: FloatArray) -> tuple[FloatArray, FloatArray]:
        """(C, B) complete and stopped samples of the prompts, each prompt counted with its `shares`
        (N, C, BLOCK)."""
        ended = np.zeros((shares.shape[1], self.starts.size))
        stopped = np.zeros_like(ended)
        ended[:, self.ended_bins] = (shares @ self.ended).sum(axis=0)
        stopped[:, self.stopped_bins] = (shares @ self.stopped).sum(axis=0)
        return ended, stopped

    @classmethod
    def of(cls, prompts: Sequence[PromptLengths], starts: IntArray) -> _Data:
        cap = int(starts[-1])
        ends, ends_of = _flat([prompt.finished for prompt in prompts])
        stops, stops_of = _flat([prompt.stopped for prompt in prompts])
        if not ends.size:
            raise ValueError("no complete response to estimate the lengths from")
        _check_lengths(ends, cap)
        _check_lengths(stops, cap)
        stops, stops_of = stops[stops > 0], stops_of[stops > 0]  # every length is above 0
        stops = np.minimum(stops, cap - 1)  # and none above the cap
        end_bins, stop_bins = _bins(starts, ends), _bins(starts, stops)
        widths = np.diff(np.append(starts, cap + 1))
        left = (starts + widths - 1)[stop_bins] - np.maximum(stops, starts[stop_bins])
        ended_bins, ends_in = np.unique(end_bins, return_inverse=True)
        stopped_bins, stops_in = np.unique(stop_bins, return_inverse=True)
        return cls(
            starts=starts,
            centres=_bin_means(end_bins, ends, starts + (widths - 1) / 2),
            ended=_table(ends_of, ends_in, len(prompts), ended_bins.size),
            ended_bins=ended_bins,
            stopped=_table(stops_of, stops_in, len(prompts), stopped_bins.size),
            stopped_bins=stopped_bins,
            beyond=_bin_means(stop_bins, left / widths[stop_bins], (widths - 1) / (2 * widths)),
            longest=int(ends.max()),
            num_prompts=len(prompts),
        )


def _flat(lengths: Sequence[Sequence[int]]) -> tuple[IntArray, IntArray]:
    """All lengths in one array, and the row each came from."""
    sizes = np.fromiter(map(len, lengths), dtype=np.int64, count=len(lengths))
    flat = np.fromiter(chain.from_iterable(lengths), dtype=np.int64, count=int(sizes.sum()))
    return flat, np.repeat(np.arange(len(lengths)), sizes)


def _table(rows: IntArray, columns: IntArray, num_rows: int, num_columns: int) -> FloatArray:
    num_blocks = -(-num_rows // BLOCK)
    size = num_blocks * BLOCK * num_columns
    cells = np.bincount(rows * num_columns + columns, minlength=size)
    return cells.reshape(num_blocks, BLOCK, num_columns).astype(np.float64)


def _bin_means(bins: IntArray, values: NDArray[Any], otherwise: FloatArray) -> FloatArray:
    """Mean of the values in every bin; `otherwise` where there is none."""
    num = np.bincount(bins, minlength=otherwise.size)
    total = np.bincount(bins, weights=values, minlength=otherwise.size)
    return np.where(num > 0, total / np.maximum(num, 1), otherwise)


def _bins(starts: IntArray, lengths: IntArray) -> IntArray:
    return np.maximum(np.searchsorted(starts, lengths, side="right") - 1, 0)


def _check_lengths(lengths: IntArray, cap: int) -> None:
    if lengths.size and not 0 <= lengths.min() <= lengths.max() <= cap:
        wrong = lengths.min() if lengths.min() < 0 else lengths.max()
        raise ValueError(f"a length of {wrong} tokens, outside 0 to the cap of {cap}")


def _check_start(start: LengthModel, cap: int, num_classes: int) -> None:
    if start.cap != cap or start.class_weights.size != num_classes:
        raise ValueError(
            f"cannot go on from a fit with {start.class_weights.size} classes and a cap of "
            f"{start.cap} tokens: {num_classes} classes and {cap} tokens are asked for"
        )


def _survival(densities: FloatArray, beyond: FloatArray) -> FloatArray:
    """(M, B) probability that a sample outlives a stop in bin b."""
    later = np.cumsum(densities[:, ::-1], axis=1)[:, ::-1] - densities
    return np.maximum(later, 0.0) + densities * beyond


def _em(
    data: _Data, parts: _Parts, prior: FloatArray, max_iterations: int, tolerance: float
) -> tuple[_Parts, float, int]:
    least = tolerance * data.num_samples
    objective = -math.inf
    for iteration in range(max_iterations + 1):
        shares, now = _explain(data, parts, prior)
        if iteration == max_iterations or now - objective < least:
            break
        objective = now
        parts = _improve(data, shares, parts, prior)
    return parts, now, iteration


def _explain(data: _Data, parts: _Parts, prior: FloatArray) -> tuple[FloatArray, float]:
    """E step: (N, C, BLOCK) probability of each class given what a prompt has shown, and the
    objective."""
    densities = parts.densities()
    log_density = _log(densities)
    log_survival = _log(_survival(densities, data.beyond))
    logs = data.log_likelihoods(log_density, log_survival)
    logs += _log(parts.weights.reshape(-1, 1))
    top = logs.max(axis=1, keepdims=True)
    shares = np.exp(logs - top)
    total = shares.sum(axis=1, keepdims=True)
    shares /= total
    num_in_last = data.num_prompts - (len(shares) - 1) * BLOCK
    shares[-1, :, num_in_last:] = 0.0
    per_prompt = (top + np.log(total)).ravel()[: data.num_prompts]
    return shares, float(per_prompt.sum() + _log_prior(parts, prior))


def _log_prior(parts: _Parts, prior: FloatArray) -> float:
    """`prior` (M + 1, B): pseudo-samples of the bodies and of the stray responses."""
    log_prior = (_log(parts.bodies) * prior[:-1]).sum()
    log_prior += PRIOR_PROMPTS * _log(parts.weights).sum()
    if len(parts.weights) > 1:
        log_prior += (_log(parts.stray) * prior[-1]).sum()
    return float(log_prior)


def _improve(data: _Data, shares: FloatArray, parts: _Parts, prior: FloatArray) -> _Parts:
    """M step. A stopped sample is spread over the bins beyond its stop as the class's density has
    it."""
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
        rate = float(from_stray.sum()) / max(float(twins.sum()), TINY)
        rate = min(max(rate, MIN_STRAY_RATE), MAX_STRAY_RATE)
        stray = from_stray.sum(axis=0) + prior[-1]
        stray = stray / stray.sum()
    weights = shares.sum(axis=(0, 2)).reshape(parts.weights.shape) + PRIOR_PROMPTS
    return _Parts(
        weights=weights / weights.sum(),
        bodies=bodies / bodies.sum(axis=1, keepdims=True),
        stray=stray,
        stray_rate=rate,
    )


def _log(values: FloatArray) -> FloatArray:
    return np.asarray(np.log(np.maximum(values, TINY)), dtype=np.float64)


def _fit_pooled(data: _Data) -> FloatArray:
    """(B,) the distribution if all samples were alike: the one-class fit, in closed form.

    Product-limit: the share of the still running samples that end in a bin, bin by bin. Samples
    stopped in a bin count as running in it with the share of the bin that lies before their stop.
    A little is added everywhere, so that no bin is ruled out.
    """
    everyone = np.ones((len(data.ended), 1, BLOCK))
    (ended,), (stopped,) = data.totals(everyone)
    total = ended + stopped
    at_risk = np.cumsum(total[::-1])[::-1] - stopped * data.beyond
    hazard = np.where(ended > 0, ended / np.maximum(at_risk, TINY), 0.0)
    survival = np.concatenate([[1.0], np.cumprod(1.0 - np.clip(hazard, 0.0, 1.0))])
    density = -np.diff(survival)
    longest = int(np.flatnonzero(ended)[-1])
    rest = np.zeros_like(density)
    rest[min(longest + 1, density.size - 1) :] = 1.0
    density += survival[-1] * rest / rest.sum()
    density = np.maximum(density, 0.0) + 1e-2 / (density.size * max(total.sum(), 1.0))
    return np.asarray(density / density.sum(), dtype=np.float64)


def _cold_start(data: _Data, num_classes: int, hard_prompts: bool) -> _Parts:
    """Equally frequent classes that cut up a Gaussian copula with the pooled distribution."""
    pooled = _fit_pooled(data)
    weights = np.full((1, num_classes), 1.0 / num_classes)
    best, best_objective = None, -math.inf
    for correlation in START_CORRELATIONS:
        bodies = _copula_classes(pooled, correlation, weights[0])
        parts = _Parts(weights=weights, bodies=bodies, stray=pooled, stray_rate=0.0)
        _, objective = _explain(data, parts, np.zeros((num_classes + 1, pooled.size)))
        if objective > best_objective:
            best, best_objective = parts, objective
    assert best is not None
    if not hard_prompts:
        return best
    beyond = np.cumsum(pooled) > 1 - START_STRAY_TAIL
    stray = np.where(beyond, pooled, 1e-3 * pooled)
    return _Parts(
        weights=np.vstack([weights * (1 - START_HARD_SHARE), weights * START_HARD_SHARE]),
        bodies=best.bodies,
        stray=stray / stray.sum(),
        stray_rate=START_STRAY_RATE,
    )


def _prior(data: _Data, parts: _Parts) -> FloatArray:
    """(M + 1, B) pseudo-samples of every class: what a Gaussian copula with the same correlation
    and marginal has in it; in the last row those of the stray responses."""
    weights = parts.weights.sum(axis=0)
    weights = weights / weights.sum()
    marginal = weights @ parts.bodies
    marginal = marginal / marginal.sum()
    scores = _scores(marginal)
    class_means = parts.bodies @ scores
    correlation = _share_between(weights, class_means, marginal, scores)
    order = np.argsort(class_means, kind="stable")
    classes = np.empty_like(parts.bodies)
    classes[order] = _copula_classes(marginal, min(correlation, 0.99), weights[order])
    classes = (1 - PRIOR_EVEN) * classes + PRIOR_EVEN / marginal.size
    classes *= PRIOR_SHARE * data.num_samples / len(classes)
    return np.vstack([classes, PRIOR_PROMPTS * marginal])


def _copula_classes(marginal: FloatArray, correlation: float, weights: FloatArray) -> FloatArray:
    """(M, B) lengths with normal scores sqrt(rho) u + sqrt(1 - rho) e, cut into classes by u."""
    lower = np.cumsum(weights) - weights
    inside = (np.arange(COPULA_NODES) + 0.5) / COPULA_NODES
    places = lower[:, np.newaxis] + weights[:, np.newaxis] * inside
    nodes = _normal_quantiles(np.clip(places.ravel(), 1e-9, 1 - 1e-9))
    edges = _normal_quantiles(np.clip(np.cumsum(marginal)[:-1], 1e-15, 1 - 1e-15))
    scaled = edges - math.sqrt(correlation) * nodes[:, np.newaxis]
    below = _normal_cdf(scaled / math.sqrt(1 - correlation))
    ends = np.ones((nodes.size, 1))
    at_nodes = np.diff(np.hstack([0 * ends, below, ends]), axis=1)
    classes = at_nodes.reshape(weights.size, COPULA_NODES, -1).mean(axis=1)
    classes = np.maximum(classes, 1e-9 * marginal)
    classes *= marginal / (weights @ classes)  # a few nodes do not add up to it exactly
    return np.asarray(classes / classes.sum(axis=1, keepdims=True), dtype=np.float64)


def _scores(density: FloatArray) -> FloatArray:
    """(B,) normal scores of the bins' middle ranks."""
    middle = np.cumsum(density) - density / 2
    return _normal_quantiles(np.clip(middle, 1e-12, 1 - 1e-12))


def _share_between(
    weights: FloatArray, class_means: FloatArray, density: FloatArray, scores: FloatArray
) -> float:
    """Variance of the scores between classes over all of it."""
    mean = density @ scores
    variance = density @ (scores - mean) ** 2
    return float(weights @ (class_means - mean) ** 2 / variance) if variance > 0 else 0.0


def _normal_quantiles(shares: Iterable[float]) -> FloatArray:
    return np.array([NormalDist().inv_cdf(float(share)) for share in shares])


def _normal_cdf(values: FloatArray) -> FloatArray:
    erf = np.vectorize(math.erf, otypes=[np.float64])
    return np.asarray(0.5 * (1.0 + erf(values / math.sqrt(2.0))), dtype=np.float64)
