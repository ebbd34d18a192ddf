"""Bins of length: narrow for short responses, wide for long ones, the cap by itself."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

BINS_PER_OCTAVE = 8
"""A bin is 9 % wide, and never narrower than one token."""


@cache
def bin_starts(cap: int) -> IntArray:
    """First length of every bin, (B,), for lengths of 1 to `cap` tokens.

    The bins grow by 2 ** (1 / BINS_PER_OCTAVE); the last one holds `cap` alone, because there the
    distribution has a jump.
    """
    if cap < 2:
        raise ValueError(f"the cap must be at least 2 tokens, not {cap}")
    num_bins = math.ceil(math.log2(cap) * BINS_PER_OCTAVE) + 1
    starts = np.ceil(2.0 ** (np.arange(num_bins) / BINS_PER_OCTAVE) - 1e-9).astype(np.int64)
    starts = np.append(np.unique(starts[starts < cap]), cap)
    starts.flags.writeable = False  # everybody gets the same array
    return starts


def bins_of(starts: IntArray, lengths: IntArray) -> IntArray:
    return np.maximum(np.searchsorted(starts, lengths, side="right") - 1, 0)


def check_lengths(lengths: IntArray, cap: int) -> None:
    if lengths.size and not 0 <= lengths.min() <= lengths.max() <= cap:
        wrong = lengths.min() if lengths.min() < 0 else lengths.max()
        raise ValueError(f"a length of {wrong} tokens, outside 0 to the cap of {cap}")


def normal_scores(density: FloatArray) -> FloatArray:
    """(B,) normal scores of the bins' middle ranks."""
    middle = np.cumsum(density) - density / 2
    return normal_quantiles(np.clip(middle, 1e-12, 1 - 1e-12))


def share_between(
    weights: FloatArray, class_means: FloatArray, density: FloatArray, scores: FloatArray
) -> float:
    """Variance of the scores between classes over all of it."""
    mean = density @ scores
    variance = density @ (scores - mean) ** 2
    return float(weights @ (class_means - mean) ** 2 / variance) if variance > 0 else 0.0


def normal_quantiles(shares: Iterable[float]) -> FloatArray:
    return np.array([NormalDist().inv_cdf(float(share)) for share in shares])


def normal_cdf(values: FloatArray) -> FloatArray:
    erf = np.vectorize(math.erf, otypes=[np.float64])
    return np.asarray(0.5 * (1.0 + erf(values / math.sqrt(2.0))), dtype=np.float64)
