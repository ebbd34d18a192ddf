"""The product-limit mean of lengths of which some are only known to be longer.

A sample that was stopped after 80 tokens has not the length 80: it would have been longer (its
length is *censored*). Leaving such samples out, or taking them for finished, makes the policy look
brief. A run fits a mixture of classes instead (`rollpacker/core/lengths/`); this is what
`benchmarks/debias.py` compares it with."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def kaplan_meier_mean(finished: ArrayLike, censored: ArrayLike, cap: float | None = None) -> float:
    """Mean length from complete and from stopped samples, restricted at `cap` tokens.

    `finished` (N,) are lengths of complete responses, `censored` (M,) the tokens that stopped ones
    had reached. The survival curve is the product-limit estimate of Kaplan and Meier (1958); the
    mean is the area under it up to `cap` (None: up to the longest length seen). A curve that never
    falls to zero because the longest samples were stopped stays level up to `cap`. Of equal lengths
    the stopped ones count as longer.

    The estimate is exact in the limit if stopping has nothing to do with what the sample would have
    become. In tail batching it has: a stop time is set by when *other* samples of the prompt
    finish, and those are alike.

    Raises `ValueError` if nothing was finished and nothing stopped, or if `cap` is not positive.
    """
    ends = np.asarray(finished, dtype=np.float64).ravel()
    stops = np.asarray(censored, dtype=np.float64).ravel()
    if ends.size + stops.size == 0:
        raise ValueError("no lengths to estimate a mean from")
    if cap is None:
        cap = float(max(ends.max(initial=0.0), stops.max(initial=0.0)))
    if not cap > 0:
        raise ValueError(f"cap must be more than 0, not {cap}")
    both = np.sort(np.concatenate([ends, stops]))
    times, num_ended = np.unique(ends, return_counts=True)
    at_risk = both.size - np.searchsorted(both, times, side="left")
    below = times < cap
    survival = np.concatenate([[1.0], np.cumprod(1.0 - num_ended[below] / at_risk[below])])
    return float(survival @ np.diff(np.concatenate([[0.0], times[below], [cap]])))
