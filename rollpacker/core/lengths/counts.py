"""Number of responses that finished or were stopped, by prompt and bin of length, for the fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollpacker.core.lengths.bins import FloatArray, IntArray, bins_of, check_lengths
from rollpacker.core.portable import to_grid

BLOCK = 128
"""Number of prompts per block: `log_likelihoods` and `totals` multiply matrices block by block. So
small a product runs on one thread, which is fastest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLengths:
    """Lengths in tokens that all launches of one prompt have shown."""

    finished: tuple[int, ...] = ()
    """Lengths of complete responses, in tokens."""
    stopped: tuple[int, ...] = ()
    """Tokens that stopped responses had reached; all of them would have become longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthCounts:
    """Number of responses per prompt and bin (interval of length), in N blocks of `BLOCK` prompts.
    Prompts without responses fill up the last block."""

    starts: IntArray
    centres: FloatArray
    ended: FloatArray
    """(N, BLOCK, E) number of complete responses per prompt and bin, of the E bins with any."""
    ended_bins: IntArray
    """(E,) numbers of the bins that the last axis of `ended` stands for."""
    stopped: FloatArray
    """(N, BLOCK, S) number of stopped responses per prompt and bin, of the S bins with any."""
    stopped_bins: IntArray
    """(S,) numbers of the bins that the last axis of `stopped` stands for."""
    most_per_prompt: float
    """Number of complete and stopped responses of the prompt that has most of these."""
    beyond: FloatArray
    """(B,) share of each bin's width that lies above the length at which a response was stopped, on
    average over the responses that were stopped in this bin."""
    longest: int
    num_prompts: int

    @property
    def num_samples(self) -> float:
        """Number of responses, complete and stopped, of all prompts together."""
        return float(self.ended.sum() + self.stopped.sum())  # whole numbers: exact in any order

    def log_likelihoods(self, log_density: FloatArray, log_survival: FloatArray) -> FloatArray:
        """(N, C, BLOCK) log probability of each prompt's responses if it were in class c of
        prompts. (C, B) `log_density`: log probability that a response ends in a bin;
        `log_survival`: that it becomes longer than one stopped there. Rounded logs make the sums
        exact on every processor."""
        ends, stops = log_density[:, self.ended_bins], log_survival[:, self.stopped_bins]
        both = to_grid(np.hstack([ends, stops]), self.most_per_prompt)
        logs = both[:, : self.ended_bins.size] @ self.ended.swapaxes(1, 2)
        logs += both[:, self.ended_bins.size :] @ self.stopped.swapaxes(1, 2)
        return np.asarray(logs, dtype=np.float64)

    def totals(self, shares: FloatArray) -> tuple[FloatArray, FloatArray]:
        """(C, B) number of complete and of stopped responses by class of prompts and bin of length.
        (N, C, BLOCK) `shares`: chance of each class for a prompt, rounded so that sums are
        exact."""
        shares = to_grid(shares, self.num_samples)
        ended = np.zeros((shares.shape[1], self.starts.size))
        stopped = np.zeros_like(ended)
        ended[:, self.ended_bins] = (shares @ self.ended).sum(axis=0)
        stopped[:, self.stopped_bins] = (shares @ self.stopped).sum(axis=0)
        return ended, stopped

    @classmethod
    def of(cls, prompts: Sequence[PromptLengths], starts: IntArray) -> LengthCounts:
        cap = int(starts[-1])
        ends, ends_of = _flat([prompt.finished for prompt in prompts])
        stops, stops_of = _flat([prompt.stopped for prompt in prompts])
        if not ends.size:
            raise ValueError("no complete response to estimate the lengths from")
        check_lengths(ends, cap)
        check_lengths(stops, cap)
        stops, stops_of = stops[stops > 0], stops_of[stops > 0]  # every length is above 0
        stops = np.minimum(stops, cap - 1)  # and none above the cap
        end_bins, stop_bins = bins_of(starts, ends), bins_of(starts, stops)
        widths = np.diff(np.append(starts, cap + 1))
        left = (starts + widths - 1)[stop_bins] - np.maximum(stops, starts[stop_bins])
        sizes = np.bincount(ends_of, minlength=len(prompts))
        sizes += np.bincount(stops_of, minlength=len(prompts))
        ended_bins, ends_in = np.unique(end_bins, return_inverse=True)
        stopped_bins, stops_in = np.unique(stop_bins, return_inverse=True)
        return cls(
            starts=starts,
            centres=_bin_means(end_bins, ends, starts + (widths - 1) / 2),
            ended=_table(ends_of, ends_in, len(prompts), ended_bins.size),
            ended_bins=ended_bins,
            stopped=_table(stops_of, stops_in, len(prompts), stopped_bins.size),
            stopped_bins=stopped_bins,
            most_per_prompt=float(sizes.max()),
            beyond=_bin_means(stop_bins, left / widths[stop_bins], (widths - 1) / (2 * widths)),
            longest=int(ends.max()),
            num_prompts=len(prompts),
        )


def _flat(lengths: Sequence[Sequence[int]]) -> tuple[IntArray, IntArray]:
    """Returns all lengths as one array, and an array with the index of the sequence of each."""
    sizes = np.fromiter(map(len, lengths), dtype=np.int64, count=len(lengths))
    flat = np.fromiter(chain.from_iterable(lengths), dtype=np.int64, count=int(sizes.sum()))
    return flat, np.repeat(np.arange(len(lengths)), sizes)


def _table(rows: IntArray, columns: IntArray, num_rows: int, num_columns: int) -> FloatArray:
    num_blocks = -(-num_rows // BLOCK)
    size = num_blocks * BLOCK * num_columns
    cells = np.bincount(rows * num_columns + columns, minlength=size)
    return cells.reshape(num_blocks, BLOCK, num_columns).astype(np.float64)


def _bin_means(bins: IntArray, values: NDArray[Any], otherwise: FloatArray) -> FloatArray:
    """Mean of `values` in each bin; for a bin without values its entry of `otherwise`."""
    num = np.bincount(bins, minlength=otherwise.size)
    total = np.bincount(bins, weights=values, minlength=otherwise.size)
    return np.where(num > 0, total / np.maximum(num, 1), otherwise)
