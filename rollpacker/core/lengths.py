"""Length statistics that know about stopped samples.

A sample that was stopped after 80 tokens has not the length 80: it would have been longer (its length is
*censored*). Leaving such samples out, or taking them for finished, makes the policy look brief.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike


def kaplan_meier_mean(finished: ArrayLike, censored: ArrayLike, cap: float | None = None) -> float:
    """Mean length from complete and from stopped samples, restricted at `cap` tokens.

    `finished` (N,) are lengths of complete responses, `censored` (M,) the tokens that stopped ones had reached.
    The survival curve is the product-limit estimate of Kaplan and Meier (1958); the mean is the area under it
    up to `cap` (None: up to the longest length seen). A curve that never falls to zero because the longest
    samples were stopped stays level up to `cap`. Of equal lengths the stopped ones count as longer.

    The estimate is exact in the limit if stopping has nothing to do with what the sample would have become.
    In tail batching it has: a stop time is set by when *other* samples of the prompt finish. See
    `LengthWindow` for how large the error is.

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
    stops = np.minimum(stops, cap)
    stops = np.append(stops, np.full(int((ends > cap).sum()), cap))
    times, num_ended = np.unique(ends[ends <= cap], return_counts=True)
    both = np.sort(np.concatenate([ends[ends <= cap], stops]))
    at_risk = both.size - np.searchsorted(both, times, side="left")
    survival = np.concatenate([[1.0], np.cumprod(1.0 - num_ended / at_risk)])
    return float(survival @ np.diff(np.concatenate([[0.0], times, [cap]])))


class LengthWindow:
    """Trained lengths against the policy's own, over the last `num_steps` steps.

    Every prompt counts once, with the attempt that settled it: a prompt that was set aside waits out of sight
    until its long round, whose samples all finish. What remains censored are the surplus samples of prompts
    that were done.

    This is an approximation. Stop times depend on sibling samples and a prompt is set aside *because* its
    samples were slow. On simulated log-normal lengths (both factors 1.25, 8 x 8) the policy's own mean came
    out 0.91 to 1.14 of the truth; with surplus samples but no set-aside prompts (1.0, 1.25) and lengths that
    depend almost only on the prompt, up to 1.37. Read the shift as a size, not as a measurement.
    """

    def __init__(self, num_steps: int = 20) -> None:
        assert num_steps >= 1
        self.num_steps = num_steps
        self._steps: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def add(self, trained: Sequence[int], finished: Sequence[int], censored: Sequence[int]) -> None:
        """One step's lengths: those trained on, all that finished, and where the others were stopped."""
        step = tuple(
            np.asarray(lengths, dtype=np.int64) for lengths in (trained, finished, censored)
        )
        self._steps.append(step)  # type: ignore[arg-type]
        del self._steps[: -self.num_steps]

    def trained_mean(self) -> float | None:
        """Mean trained length in tokens; None before anything was trained on."""
        trained = np.concatenate([step[0] for step in self._steps] or [np.zeros(0)])
        return float(trained.mean()) if trained.size else None

    def policy_mean(self, cap: float | None = None) -> float | None:
        """Estimated mean length of the policy's own responses in tokens, restricted at `cap`."""
        finished = np.concatenate([step[1] for step in self._steps] or [np.zeros(0)])
        censored = np.concatenate([step[2] for step in self._steps] or [np.zeros(0)])
        if not finished.size:
            return None
        return kaplan_meier_mean(finished, censored, cap)
