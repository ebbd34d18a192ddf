"""Loss weights by length. Short rounds keep the first samples to finish, and so favour short
responses; the weights undo this."""

from __future__ import annotations

import numpy as np

from rollpacker.core.lengths.bins import FloatArray
from rollpacker.core.lengths.model import LengthModel
from rollpacker.core.portable import interpolated, total_of

MIN_EFFECTIVE = 0.71
"""Least effective sample size (`effective_sample_size`) that `moment_weights` aims to leave."""
MIN_WEIGHT = 0.05
"""Least weight that `moment_weights` gives, since a negative one would turn a sample's sign."""


def effective_sample_size(weights: FloatArray, counts: FloatArray | None = None) -> float:
    """Kish's effective sample size (sum w)^2 / (n sum w^2), 0 to 1: the share of the n samples that
    would be as precise if unweighted. `counts`: number of samples with each weight (None: one)."""
    weights = np.asarray(weights, dtype=np.float64)
    counts = np.ones_like(weights) if counts is None else counts
    squares = total_of(counts) * total_of(counts * (weights * weights))
    if not squares > 0:
        raise ValueError("no sample has a weight")
    sum_of_weights = total_of(counts * weights)
    return sum_of_weights * sum_of_weights / squares


def density_weights(
    model: LengthModel, counts: FloatArray, *, max_weight: float = 10.0
) -> FloatArray:
    """(B,) weights by bin of length: the policy's own density over the trained one. `counts` (B,)
    are the trained samples in every bin. Over them the weights have the mean 1, and none is above
    `max_weight`. A bin without trained samples gets a weight between those of its neighbours."""
    share = _shares(counts, max_weight)
    seen = share > 0
    bins = np.arange(share.size, dtype=np.float64)
    ratio = interpolated(bins, bins[seen], model.density[seen] / share[seen])
    return _to_mean_one(ratio, share, max_weight)


def moment_weights(
    model: LengthModel,
    counts: FloatArray,
    *,
    max_weight: float = 10.0,
    min_effective: float = MIN_EFFECTIVE,
) -> FloatArray:
    """(B,) weights by bin of length with which the trained samples have the policy's own mean
    length. They are `density_weights` plus a linear function of the length that makes the mean
    exact. If that leaves an effective sample size below `min_effective`, the density weights are
    first moved towards 1, as little as is enough, before the linear function is added. All weights
    are bounded on both sides: the mean is exact unless many weights lie on a bound."""
    share = _shares(counts, max_weight)
    ratio = density_weights(model, counts, max_weight=max_weight)
    own_mean = model.mean()

    def shrunk(towards_one: float) -> FloatArray:
        start = (1 - towards_one) * ratio + towards_one
        return _to_mean_length(start, share, model.centres, own_mean, max_weight)

    best = shrunk(0.0)
    if effective_sample_size(best, share) >= min_effective:
        return best
    low, high = 0.0, 1.0
    best = shrunk(high)
    for _ in range(10):
        middle = (low + high) / 2
        weights = shrunk(middle)
        if effective_sample_size(weights, share) >= min_effective:
            high, best = middle, weights
        else:
            low = middle
    return best


def _shares(counts: FloatArray, max_weight: float) -> FloatArray:
    if not max_weight >= 1:
        raise ValueError(f"max_weight must be at least 1, not {max_weight}")
    counts = np.asarray(counts, dtype=np.float64)
    num = total_of(counts)
    if not num > 0:
        raise ValueError("no trained samples to weigh")
    return np.asarray(counts / num, dtype=np.float64)


def _to_mean_one(weights: FloatArray, share: FloatArray, max_weight: float) -> FloatArray:
    """The weights scaled so that their mean over the samples is 1, and bounded by `max_weight`.
    `share` (B,): share of the samples in each bin."""
    for _ in range(50):
        mean = total_of(share * weights)
        if not mean > 0:
            return np.ones_like(weights)
        weights = np.minimum(weights / mean, max_weight)
        if abs(total_of(share * weights) - 1) < 1e-12:
            break
    return weights


def _to_mean_length(
    weights: FloatArray,
    share: FloatArray,
    lengths: FloatArray,
    own_mean: float,
    max_weight: float,
) -> FloatArray:
    """The weights plus the linear function of `lengths` that gives them the mean 1 and the weighted
    mean length `own_mean`. Then weights are bounded; so this is repeated until the mean fits."""
    centred = lengths - total_of(share * lengths)
    variance = total_of(share * (centred * centred))
    if not variance > 0:
        return _to_mean_one(weights, share, max_weight)
    for _ in range(30):
        missing = own_mean - total_of(share * (weights * lengths))
        lost = 1 - total_of(share * weights)
        weights = weights + lost + missing / variance * centred
        weights = _to_mean_one(np.clip(weights, MIN_WEIGHT, max_weight), share, max_weight)
        if abs(missing) < 1e-6 * own_mean:
            break
    return weights
