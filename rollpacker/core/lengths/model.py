"""The policy's own distribution of response lengths, as a fit found it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from rollpacker.codec import from_plain, to_plain
from rollpacker.core.lengths.bins import (
    FloatArray,
    IntArray,
    bin_starts,
    bins_of,
    check_lengths,
    normal_scores,
    share_between,
)
from rollpacker.core.portable import dot, mixed, total_of

TINY = 1e-300
"""Stands in place of 0 in a logarithm or in a denominator."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LengthModel:
    """A fitted distribution of lengths: C classes of prompts over B bins (intervals) of length."""

    cap: int
    """Longest response there can be, in tokens."""
    centres: FloatArray
    """(B,) mean length of the responses in every bin, in tokens."""
    class_weights: FloatArray
    """(C,) share of the prompts that are in each class."""
    class_densities: FloatArray
    """(C, B) share of each class's responses that are in each bin; rows add up to 1."""
    stray_density: FloatArray
    """(B,) share of stray responses in each bin: those whose length is not their class's."""
    stray_rate: float
    """Share of responses with a length unlike their class's ("stray"), in the second half of the
    classes, which are like the first half but for these. 0.0: there is no such half."""
    num_prompts: int
    """Number of prompts to whose responses the distribution was fitted."""
    longest: int
    """Tokens of the longest complete response among those fitted to."""
    objective: float
    """Log likelihood of the prompts plus the log prior. No iteration makes it smaller."""
    num_iterations: int

    @property
    def starts(self) -> IntArray:
        """(B,) first length of every bin, in tokens. The last one is the cap."""
        return bin_starts(self.cap)

    @property
    def density(self) -> FloatArray:
        """(B,) share of the policy's own responses in every bin (interval) of length."""
        return mixed(self.class_weights, self.class_densities)

    @property
    def num_parameters(self) -> int:
        """Number of free parameters that a fit with these classes has."""
        num_bins = self.starts.size
        if not self.stray_rate:
            return int(self.class_weights.size * num_bins)
        return int((self.class_weights.size // 2 + 1) * num_bins + self.class_weights.size)

    def mean(self) -> float:
        """The policy's own mean response length in tokens."""
        return total_of(self.density * self.centres)

    def quantile(self, q: float) -> float:
        """Length in tokens that a share `q` of the policy's own responses does not exceed."""
        if not 0 <= q <= 1:
            raise ValueError(f"a quantile's share lies between 0 and 1, not {q}")
        return float(self._at(np.array([q]))[0])

    def unseen(self) -> float:
        """Share of the policy's own responses that are longer than the bin of the longest complete
        one. Stopped samples show that such responses exist, but not how long they are."""
        return total_of(self.density[int(self.bins([self.longest])[0]) + 1 :])

    def bins(self, lengths: ArrayLike) -> IntArray:
        """Index of the bin of each length in tokens. Raises `ValueError` for a length below 0 or
        above the cap; an empty response is in the first bin."""
        values = np.asarray(lengths, dtype=np.int64)
        check_lengths(values, self.cap)
        return bins_of(self.starts, values)

    def counts(self, lengths: ArrayLike) -> FloatArray:
        """(B,) number of the given `lengths` that are in each bin (interval) of length."""
        return np.bincount(self.bins(lengths), minlength=self.starts.size).astype(np.float64)

    def tail_share(self, lengths: ArrayLike, q: float = 0.95) -> float:
        """How much of the policy's own tail (longer than its quantile `q`) is among `lengths`: the
        tail's share of them over its share of the policy's responses. 1.0: all of it, 0.0: none."""
        return self.tail_share_of(self.counts(lengths), q)

    def tail_share_of(self, counts: FloatArray, q: float = 0.95) -> float:
        """As `tail_share`, for lengths given by their number in each bin, `counts` (B,)."""
        if not counts.sum():
            raise ValueError("no lengths to compare with the policy's own")
        first = int(self.bins([self.quantile(q)])[0])
        own = total_of(self.density[first:])
        return float(counts[first:].sum() / counts.sum() / own)

    def within_prompt_correlation(self) -> float:
        """Correlation between two responses to one prompt, of the lengths' normal scores (standard
        normal quantiles of the lengths' ranks): the `rho` of a Gaussian copula, from 0 to 1."""
        scores = normal_scores(self.density)
        class_means = dot(self.class_densities, scores)
        return share_between(self.class_weights, class_means, self.density, scores)

    def sample(self, rng: np.random.Generator, num_prompts: int, num_samples: int) -> IntArray:
        """(P, R) random lengths in tokens of R responses to each of P prompts."""
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
        """The model as plain lists and numbers, exactly, for a checkpoint."""
        return to_plain(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> LengthModel:
        return from_plain(cls, plain)

    def _widths(self) -> IntArray:
        return np.diff(np.append(self.starts, self.cap + 1))

    def _at(self, shares: FloatArray) -> FloatArray:
        """Length that each of the `shares` of the policy's own responses does not exceed, where
        lengths are spread evenly inside a bin."""
        density = self.density
        cumulative = np.cumsum(density)
        bins = np.searchsorted(cumulative, shares * cumulative[-1] - 1e-12, side="left")
        bins = np.minimum(bins, self.starts.size - 1)
        rest = shares * cumulative[-1] - (cumulative[bins] - density[bins])
        place = np.clip(rest / np.maximum(density[bins], TINY), 0.0, 1.0)
        widths = self._widths()[bins]
        inside = np.minimum(np.floor(place * widths), widths - 1)
        return np.asarray(self.starts[bins] + inside, dtype=np.float64)
