"""Robust least squares with constants that are never negative, for all fits to a run's seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

Vector = np.ndarray[tuple[int], np.dtype[np.float64]]
Matrix = np.ndarray[tuple[int, int], np.dtype[np.float64]]

HUBER_SCALES = 2.0
"""A residual counts less in the fit if it exceeds this multiple of the residuals' scale (1.48 times
their median)."""
ITERATIONS = 25


@dataclass(frozen=True, slots=True)
class RobustFit:
    """Constants fitted to measured seconds, and how well they predict these seconds."""

    x: Vector
    """The constants, one for each column of the fitted matrix, for a machine without disturbances.
    Multiplied by `factor` they give the seconds of this machine."""
    weights: Vector
    """Weight of each row (measurement) in the last iteration of the fit."""
    loss: float
    """Mean relative error over the rows (measurements) that were not left out."""
    factor: float
    """Sum of the measured seconds over that of the predicted seconds: what disturbances added."""
    num_left_out: int
    """Number of rows (measurements) above their prediction by more than `robust_fit`'s `limit`."""

    @property
    def constants(self) -> list[float]:
        """`factor * x`: constants that include the time lost to disturbances, spread evenly."""
        return [float(value) for value in self.factor * self.x]


def robust_fit(columns: Matrix, seconds: Vector, limit: float = math.inf) -> RobustFit:
    """Fits constants x >= 0 with columns @ x near `seconds`, by iterated re-weighting in which
    relative errors count and outliers count less.

    Disturbances only make a machine slower, so constants that neglect them fall short of the mean.
    `factor` of the result makes up for that, except for rows that are slower than predicted by more
    than `limit` seconds."""
    floor = float(np.median(seconds)) + 1e-12
    weights = np.ones_like(seconds)
    x = np.zeros(columns.shape[1])
    for _ in range(ITERATIONS):
        old, x = x, nonnegative_least_squares(columns * weights[:, None], seconds * weights)
        predicted = columns @ x
        relative = (predicted + floor) ** -0.5
        errors = np.abs(seconds - predicted) * relative
        scale = HUBER_SCALES * 1.4826 * float(np.median(errors)) + 1e-12
        weights = relative * np.sqrt(np.minimum(1, scale / np.maximum(errors, 1e-300)))
        if np.allclose(x, old, rtol=1e-5, atol=0):
            break
    kept = seconds - predicted <= limit
    loss = float(np.mean(errors[kept]))
    factor = float(seconds[kept].sum() / predicted[kept].sum()) if predicted[kept].any() else 1.0
    return RobustFit(x, weights, loss, factor, int((~kept).sum()))


def nonnegative_least_squares(a: Matrix, b: Vector) -> Vector:
    """Returns the x >= 0 that minimises |a x - b|, by the method of Lawson and Hanson (1974)."""
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0
    # A triangle of a few rows has the same distances as the many rows of the data.
    triangle = np.asarray(np.linalg.qr(np.column_stack([a / scale, b]), mode="r"))
    a, b = triangle[:, :-1], triangle[:, -1]
    num = a.shape[1]
    x = np.zeros(num)
    free = np.zeros(num, np.bool_)
    tolerance = 1e-10 * float(np.linalg.norm(b) + 1e-300)
    for _ in range(3 * num):
        gradient = a.T @ (b - a @ x)
        gradient[free] = -np.inf
        if free.all() or gradient.max() <= tolerance:
            break
        free[int(gradient.argmax())] = True
        while True:
            best = np.zeros(num)
            best[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            negative = free & (best <= 0)
            if not negative.any():
                break
            share = float(np.min(x[negative] / (x[negative] - best[negative] + 1e-300)))
            x += share * (best - x)
            free &= x > 1e-14
            x[~free] = 0.0
        x = best
    return np.asarray(x / scale)
