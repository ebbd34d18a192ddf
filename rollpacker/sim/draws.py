"""Standard normal random numbers from a `random.Random`, the same on every processor.

`random.Random.random` is the same everywhere; its `gauss` and `lognormvariate` are not, since they
use the C library's logarithm and cosine.
"""

from __future__ import annotations

import math
import random

import numpy as np

from rollpacker.core.portable import log, on_circle

_WIDTH = 1.7155277699214135
"""4 * exp(-1/2) / sqrt(2): width of the box of random points whose ratios `normal_ratio` takes."""


def normal_ratio(rng: random.Random) -> float:
    """A standard normal score as a ratio of uniforms (Kinderman and Monahan, 1977)."""
    while True:
        first, second = rng.random(), 1.0 - rng.random()
        score = _WIDTH * (first - 0.5) / second
        if score * score / 4.0 <= -log(second):
            return score


class NormalPairs:
    """Standard normal scores, two from each pair of uniforms (Box and Muller)."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._second: float | None = None
        """The second score of the last pair; None if it was returned already."""

    def draw(self) -> float:
        """Returns the next score."""
        if self._second is not None:
            score, self._second = self._second, None
            return score
        (cosine,), (sine,) = on_circle(np.array([self._rng.random()]))
        radius = math.sqrt(-2.0 * log(1.0 - self._rng.random()))
        self._second = float(sine) * radius
        return float(cosine) * radius
