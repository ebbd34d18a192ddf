"""Length statistics that know about stopped samples.

A sample that was stopped after 80 tokens has not the length 80: it would have been longer (its
length is *censored*). Leaving such samples out, or taking them for finished, makes the policy look
brief."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

IntArray = NDArray[np.int64]


def kaplan_meier_mean(finished: ArrayLike, censored: ArrayLike, cap: float | None = None) -> float:
    """Mean length from complete and from stopped samples, restricted at `cap` tokens.

    `finished` (N,) are lengths of complete responses, `censored` (M,) the tokens that stopped ones
    had reached. The survival curve is the product-limit estimate of Kaplan and Meier (1958); the
    mean is the area under it up to `cap` (None: up to the longest length seen). A curve that never
    falls to zero because the longest samples were stopped stays level up to `cap`. Of equal lengths
    the stopped ones count as longer.

    The estimate is exact in the limit if stopping has nothing to do with what the sample would have
    become. In tail batching it has: a stop time is set by when *other* samples of the prompt
    finish. See `LengthWindow` for how large the error is.

    Raises `ValueError` if nothing was finished and nothing stopped, or if `cap` is not positive.
    """
    ends = np.asarray(finished, dtype=np.float64).ravel()
    stops = np.asarray(censored, dtype=np.float64).ravel()
    if ends.size + stops.size == 0:
        raise ValueError("no lengths to estimate a mean from")
    if cap is None:
        cap = float(max(ends.max(initial=0.0), stops.max(initial=0.0)))
    both = np.sort(np.concatenate([ends, stops]))
    times, num_ended = np.unique(ends, return_counts=True)
    at_risk = both.size - np.searchsorted(both, times, side="left")
    return _product_limit(times, num_ended, at_risk, cap)


def _product_limit(
    times: NDArray[Any], num_ended: IntArray, at_risk: IntArray, cap: float
) -> float:
    """Area up to `cap` under the curve that falls by num_ended / at_risk at each of `times`
    (ascending)."""
    if not cap > 0:
        raise ValueError(f"cap must be more than 0, not {cap}")
    below = times < cap
    survival = np.concatenate([[1.0], np.cumprod(1.0 - num_ended[below] / at_risk[below])])
    return float(survival @ np.diff(np.concatenate([[0.0], times[below], [cap]])))


class LengthWindow:
    """Trained lengths against the policy's own, over the last `num_steps` steps.

    Every prompt counts once, with the attempt that settled it: a prompt that was set aside waits
    out of sight until its long round, whose samples all finish. What remains censored are the
    surplus samples of prompts that were done.

    This is an approximation. Stop times depend on sibling samples and a prompt is set aside
    *because* its samples were slow. On simulated log-normal lengths (both factors 1.25, 8 x 8) the
    policy's own mean came out 0.91 to 1.14 of the truth; with surplus samples but no set-aside
    prompts (1.0, 1.25) and lengths that depend almost only on the prompt, up to 1.37. Read the
    shift as a size, not as a measurement."""

    def __init__(self, num_steps: int = 20) -> None:
        assert num_steps >= 1
        self.num_steps = num_steps
        self._steps: deque[tuple[_Counts, _Counts, _Counts]] = deque()
        self._window = (_Counts(), _Counts(), _Counts())
        self._run = (_Counts(), _Counts(), _Counts())

    def add(self, trained: Sequence[int], finished: Sequence[int], censored: Sequence[int]) -> None:
        """One step's lengths: those trained on, all that finished, and where the others were
        stopped."""
        step = (_Counts(trained), _Counts(finished), _Counts(censored))
        self._steps.append(step)
        gone = self._steps.popleft() if len(self._steps) > self.num_steps else None
        for kind, counts in enumerate(step):
            self._run[kind].add(counts)
            self._window[kind].add(counts)
            if gone is not None:
                self._window[kind].add(gone[kind], sign=-1)

    def means(self, cap: float | None = None) -> tuple[float | None, float | None]:
        """Mean trained length and the estimated mean of the policy's own responses, restricted at
        `cap`, in tokens, over the window; None for what nothing was seen of."""
        return _means(*self._window, cap)

    def run_means(self, cap: float | None = None) -> tuple[float | None, float | None]:
        """The same over everything that was ever added."""
        return _means(*self._run, cap)


class _Counts:
    """How often each length occurs: adding and taking away are cheap, whatever the number of
    samples."""

    def __init__(self, lengths: Sequence[int] = ()) -> None:
        self.counts = np.bincount(np.asarray(lengths, dtype=np.int64))

    def add(self, other: _Counts, *, sign: int = 1) -> None:
        self.grow(other.counts.size)
        self.counts[: other.counts.size] += sign * other.counts

    def grow(self, size: int) -> None:
        if size > self.counts.size:
            self.counts = np.pad(self.counts, (0, size - self.counts.size))


def _means(
    trained: _Counts, finished: _Counts, censored: _Counts, cap: float | None
) -> tuple[float | None, float | None]:
    size = max(finished.counts.size, censored.counts.size)
    finished.grow(size)
    censored.grow(size)
    num_trained = int(trained.counts.sum())
    total = int(trained.counts @ np.arange(trained.counts.size))
    trained_mean = total / num_trained if num_trained else None
    both = finished.counts + censored.counts
    seen = np.flatnonzero(both)
    times = np.flatnonzero(finished.counts)
    if not times.size or not seen[-1]:
        return trained_mean, None
    at_risk = both[::-1].cumsum()[::-1][times]
    cap = float(seen[-1]) if cap is None else cap
    return trained_mean, _product_limit(times, finished.counts[times], at_risk, cap)
