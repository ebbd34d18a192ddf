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
"""Width of the box of random points in `normal_ratio`: 4 * exp(-1/2) / sqrt(2)."""


def normal_ratio(rng: random.Random) -> float:
    """A standard normal random number, by the ratio of uniforms (Kinderman and Monahan, 1977)."""
    while True:
        first, second = rng.random(), 1.0 - rng.random()
        score = _WIDTH * (first - 0.5) / second
        if score * score / 4.0 <= -log(second):
            return score


class NormalPairs:
    """Draws standard normal random numbers, two from each pair of uniforms (Box and Muller)."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._second: float | None = None
        """The second number of the last pair; None if `draw` has returned it already."""

    def draw(self) -> float:
        """Returns the next standard normal random number."""
        if self._second is not None:
            score, self._second = self._second, None
            return score
        (cosine,), (sine,) = on_circle(np.array([self._rng.random()]))
        radius = math.sqrt(-2.0 * log(1.0 - self._rng.random()))
        self._second = float(sine) * radius
        return float(cosine) * radius
