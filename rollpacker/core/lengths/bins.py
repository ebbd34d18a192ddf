"""Bins (intervals) of length: narrow for short responses, wide for long ones, the cap by itself."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numpy.typing import NDArray

from rollpacker.core.portable import normal_quantiles, total_of

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

BINS_PER_OCTAVE = 8
"""Number of bins per doubling of the length: a bin is 9 % wide, but at least one token."""


@cache
def bin_starts(cap: int) -> IntArray:
    """First length of every bin, (B,), for lengths of 1 to `cap` tokens. The bins grow by 2 ** (1 /
    BINS_PER_OCTAVE); the last one holds `cap` alone, because there the distribution has a jump."""
    if cap < 2:
        raise ValueError(f"the cap must be at least 2 tokens, not {cap}")
    num_bins = (cap**BINS_PER_OCTAVE - 1).bit_length() + 1
    # Square roots are rounded alike on all processors, powers are not.
    half = math.sqrt(2.0)
    quarter = math.sqrt(half)
    eighth = math.sqrt(quarter)
    first_four = np.array([1.0, eighth, quarter, quarter * eighth])
    parts = np.append(first_four, half * first_four)
    octaves, place = np.divmod(np.arange(num_bins), BINS_PER_OCTAVE)
    starts = np.ceil(np.ldexp(parts[place], octaves) - 1e-9).astype(np.int64)
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
    """(B,) normal score of each bin: the standard normal quantile of its responses' mean rank.
    `density` (B,) is the share of all responses in each bin."""
    middle = np.cumsum(density) - density / 2
    return normal_quantiles(np.clip(middle, 1e-12, 1 - 1e-12))


def share_between(
    weights: FloatArray, class_means: FloatArray, density: FloatArray, scores: FloatArray
) -> float:
    """Share, 0 to 1, of the variance of `scores` (one per bin of length, with its share `density`
    of the responses) that is between classes of prompts, with these `weights` and mean scores,
    rather than inside them; 0 if there is no variance."""
    mean = total_of(density * scores)
    from_mean, between = scores - mean, class_means - mean
    variance = total_of(density * (from_mean * from_mean))
    return total_of(weights * (between * between)) / variance if variance > 0 else 0.0
