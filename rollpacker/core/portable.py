"""Arithmetic that gives the same bits on every processor.

A decision must not depend on the machine that makes it: a log that one machine recorded is replayed
on another to the same commands. Addition, subtraction, multiplication, division and square root are
rounded correctly everywhere (IEEE 754). Three things are not, and the core and the simulator do
without them:

    - `exp`, `log`, `pow`, `sin`, `erfc` of the C library and of numpy: both choose among kernels by
      processor (fused multiply-add or not, AVX2, AVX-512), and these differ in the last digit;
    - sums whose order is the library's choice: `np.sum`, `np.mean`, `@`, LAPACK;
    - expressions in C such as `np.interp` and `NormalDist.inv_cdf`, whose multiplications and
      additions a compiler for 64-bit Arm may fuse.

The functions here are made of correctly rounded operations in a fixed order. Those with a singular
name take and return a float, those with a plural name an array of float64; both give the same bits
for the same argument. Where many numbers are added, `to_grid` rounds them so that every order of
adding is exact, and a matrix product may be used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal, localcontext
from functools import cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
FloatOrArray = TypeVar("FloatOrArray", float, FloatArray)

LEAST_EXPONENT, GREATEST_EXPONENT = -708.0, 709.0
"""Least and greatest argument for which `exp` computes a value. Below the least the result is 0;
above the greatest it is that of the greatest."""
_CHUNK = 8192
"""Number of values that `exps` computes at once, so that they fit into a cache."""


def _split(value: Decimal, bits: int) -> tuple[float, float]:
    """Splits `value` into the sum of two floats: a multiple of 2**-`bits`, and a small rest."""
    high = int(value * 2**bits) / 2**bits
    return high, float(value - Decimal(high))


with localcontext() as _context:
    _context.prec = 60
    _LN2 = Decimal(2).ln()
    _LN2_HIGH, _LN2_LOW = _split(_LN2, 40)
    """The logarithm of 2 as two floats; the high one times a whole number of 11 bits is exact."""
    _STEP_HIGH, _STEP_LOW = _split(_LN2 / 64, 42)
    """The logarithm of 2 ** (1/64) as a sum of two floats. The product of the high one and a whole
    number of up to 17 bits is exact."""
    _STEPS_PER_UNIT = float(64 / _LN2)
_SQRT_HALF = math.sqrt(0.5)
_PER_SQRT_TURN = 1.0 / math.sqrt(2.0 * math.pi)
_EXP = (1 / 120, 1 / 24, 1 / 6, 0.5, 1.0)
_LOG = tuple(1 / (2 * n + 1) for n in range(11, 0, -1))
_SIN = tuple((-1) ** n / math.factorial(2 * n + 1) for n in range(8, 0, -1))
_COS = tuple((-1) ** n / math.factorial(2 * n) for n in range(8, 0, -1))


def _polynomial(coefficients: Sequence[float], x: FloatOrArray) -> FloatOrArray:
    value = coefficients[0] * x
    for coefficient in coefficients[1:-1]:
        value += coefficient
        value *= x
    value += coefficients[-1]
    return value


# -- exponential and logarithm -----------------------------------------------------------


@cache
def _powers() -> FloatArray:
    """(64,) the numbers 2 ** (j / 64) for j from 0 to 63, correctly rounded."""
    with localcontext() as context:
        context.prec = 40
        root = Decimal(2) ** (Decimal(1) / 64)
        return np.array([float(root**j) for j in range(64)])


def exp(x: float) -> float:
    """e ** x as a float, with a relative error below 3e-16."""
    if x < LEAST_EXPONENT:
        return 0.0
    x = min(x, GREATEST_EXPONENT)
    steps = round(x * _STEPS_PER_UNIT)
    rest = (x - steps * _STEP_HIGH) - steps * _STEP_LOW
    power = float(_powers()[steps & 63])
    return math.ldexp(power + power * (_polynomial(_EXP, rest) * rest), steps >> 6)


def exps(values: FloatArray) -> FloatArray:
    """`exp` of each value of an array."""
    values = np.ascontiguousarray(values, dtype=np.float64)
    found = np.empty_like(values)
    flat, out = values.ravel(), found.reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        _exps_into(flat[start : start + _CHUNK], out[start : start + _CHUNK])
    return found


def _exps_into(values: FloatArray, out: FloatArray) -> None:
    bounded = np.clip(values, LEAST_EXPONENT, GREATEST_EXPONENT)
    steps = np.rint(bounded * _STEPS_PER_UNIT)
    bounded -= steps * _STEP_HIGH
    bounded -= steps * _STEP_LOW
    grown = _EXP[0] * bounded
    for coefficient in _EXP[1:]:
        grown += coefficient
        grown *= bounded
    numbers = steps.astype(np.int64)
    power = _powers()[numbers & 63]
    grown *= power
    grown += power
    # The bits of 2 ** n: both bounds keep n within the normal numbers.
    scale = (((numbers >> 6) + 1023) << 52).view(np.float64)
    scale *= values >= LEAST_EXPONENT
    np.multiply(grown, scale, out=out)


def log(x: float) -> float:
    """The natural logarithm of a positive normal float. The error is below 3e-16 of the result or
    below 1e-16, whichever is larger."""
    part, exponent = math.frexp(x)
    if part < _SQRT_HALF:
        part, exponent = part * 2.0, exponent - 1
    return exponent * _LN2_HIGH + (_log_of_part(part) + exponent * _LN2_LOW)


def logs(values: FloatArray) -> FloatArray:
    """`log` of each value of an array."""
    part, exponent = np.frexp(values)
    is_low = part < _SQRT_HALF
    part = np.where(is_low, part * 2.0, part)
    number = (exponent - is_low).astype(np.float64)
    rest = np.asarray(_log_of_part(part))
    rest += number * _LN2_LOW
    number *= _LN2_HIGH
    return np.asarray(number + rest)


def _log_of_part(part: FloatOrArray) -> FloatOrArray:
    """The logarithm of a number between sqrt(1/2) and sqrt(2), as that of (1 + s) / (1 - s)."""
    above = part - 1.0
    s = above / (above + 2.0)
    square = s * s
    return 2.0 * s + 2.0 * s * (square * _polynomial(_LOG, square))


def log1p(x: float) -> float:
    """log(1 + x) for x above -1, exact to a few last digits also where x is tiny."""
    near = 1.0 + x
    if near == 1.0:
        return x
    return log(near) * (x / (near - 1.0))  # the factor makes up for what `near` lost of x


def log1ps(values: FloatArray) -> FloatArray:
    """`log1p` of each value of an array."""
    near = 1.0 + values
    lost = near - 1.0
    is_tiny = lost == 0.0
    found = logs(near) * (values / np.where(is_tiny, 1.0, lost))
    return np.where(is_tiny, values, found)


def power(base: float, exponent: float) -> float:
    """base ** exponent for a positive base, with a relative error up to 3e-16 * (1 + |exponent *
    log(base)|). A whole exponent (0 or more) multiplies instead, and allows every base."""
    if exponent != int(exponent) or exponent < 0:
        return exp(exponent * log(base))
    found, factor, left = 1.0, base, int(exponent)
    while left:
        if left & 1:
            found *= factor
        left >>= 1
        factor = factor * factor if left else factor
    return found


def on_circle(turns: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Cosines and sines, to 2e-16, of angles given in whole turns of the circle, from 0 to 1."""
    eighths = np.rint(turns * 4.0)
    quarter = eighths.astype(np.int64) & 3
    angle = (turns - eighths / 4.0) * (2.0 * math.pi)
    square = angle * angle
    sine = angle + angle * (square * _polynomial(_SIN, square))
    cosine = 1.0 + square * _polynomial(_COS, square)
    swapped = (quarter & 1) == 1
    x, y = np.where(swapped, sine, cosine), np.where(swapped, cosine, sine)
    return (
        np.where((quarter == 1) | (quarter == 2), -x, x),
        np.where(quarter >= 2, -y, y),
    )


# -- the normal distribution ---------------------------------------------------------------

_SERIES_TERMS, _FRACTION_TERMS = 32, 72
_SERIES_END = 2.5
"""Distance from the mean, in standard deviations, up to which a series gives the tail of a normal
distribution; beyond it a continued fraction does."""
_FURTHEST = 40.0
"""Distance from the mean, in standard deviations, beyond which a normal tail is 0 in float64."""


def normal_cdf(score: float) -> float:
    """Share of a standard normal distribution below `score`. The error is below 3e-16, and below
    1e-13 of the share itself in the lower tail."""
    distance = min(abs(score), _FURTHEST)
    density = exp(-0.5 * distance * distance) * _PER_SQRT_TURN
    is_near = distance <= _SERIES_END
    tail = _near_tail(distance, density) if is_near else _far_tail(distance, density)
    return 1.0 - tail if score > 0 else tail


def normal_cdfs(scores: FloatArray) -> FloatArray:
    """`normal_cdf` of each score of an array."""
    distance = np.minimum(np.abs(scores), _FURTHEST)
    density = exps(-0.5 * distance * distance) * _PER_SQRT_TURN
    is_near = distance <= _SERIES_END
    tail = np.empty_like(distance)
    tail[is_near] = _near_tail(distance[is_near], density[is_near])
    tail[~is_near] = _far_tail(distance[~is_near], density[~is_near])
    return np.where(scores > 0, 1.0 - tail, tail)


def _near_tail(distance: FloatOrArray, density: FloatOrArray) -> FloatOrArray:
    """Share of a standard normal distribution beyond a small `distance` d from the mean, by the
    series 1/2 - density * (d + d**3 / 3 + d**5 / (3 * 5) + ...), whose terms are all positive."""
    square = distance * distance
    term = total = distance
    for number in range(1, _SERIES_TERMS):
        term = term * square / (2 * number + 1)
        total = total + term
    return 0.5 - density * total


def _far_tail(distance: FloatOrArray, density: FloatOrArray) -> FloatOrArray:
    """Share of a standard normal distribution beyond a large `distance` d from the mean, by the
    fraction density / (d + 1 / (d + 2 / (d + 3 / (d + ...))))."""
    value = distance
    for number in range(_FRACTION_TERMS, 0, -1):
        value = distance + number / value
    return density / value


# Coefficients of M. J. Wichura, "Algorithm AS 241: The Percentage Points of the Normal
# Distribution", Applied Statistics 37 (1988): numerator and denominator, highest power first.
_MIDDLE = (
    (
        *(2.50908092873012267e3, 3.34305755835881281e4, 6.72657709270087009e4),
        *(4.59219539315498715e4, 1.37316937655094611e4, 1.97159095030655144e3),
        *(1.33141667891784377e2, 3.38713287279636661),
    ),
    (
        *(5.22649527885285456e3, 2.87290857357219427e4, 3.93078958000927106e4),
        *(2.12137943015865959e4, 5.39419602142475111e3, 6.87187007492057908e2),
        *(4.23133307016009113e1, 1.0),
    ),
)
_OUTER = (
    (
        *(7.74545014278341408e-4, 2.27238449892691846e-2, 2.41780725177450612e-1),
        *(1.27045825245236838, 3.64784832476320461, 5.76949722146069141),
        *(4.63033784615654530, 1.42343711074968358),
    ),
    (
        *(1.05075007164441684e-9, 5.47593808499534495e-4, 1.51986665636164572e-2),
        *(1.48103976427480075e-1, 6.89767334985100005e-1, 1.67638483018380385),
        *(2.05319162663775882, 1.0),
    ),
)
_OUTMOST = (
    (
        *(2.01033439929228813e-7, 2.71155556874348758e-5, 1.24266094738807844e-3),
        *(2.65321895265761230e-2, 2.96560571828504891e-1, 1.78482653991729133),
        *(5.46378491116411437, 6.65790464350110378),
    ),
    (
        *(2.04426310338993979e-15, 1.42151175831644589e-7, 1.84631831751005468e-5),
        *(7.86869131145613259e-4, 1.48753612908506149e-2, 1.36929880922735805e-1),
        *(5.99832206555887938e-1, 1.0),
    ),
)


def normal_quantile(share: float) -> float:
    """Standard normal score below which this share (0 to 1) lies; relative error below 1e-15."""
    from_middle = share - 0.5
    if abs(from_middle) <= 0.425:
        rest = 0.180625 - from_middle * from_middle
        return from_middle * (_polynomial(_MIDDLE[0], rest) / _polynomial(_MIDDLE[1], rest))
    root = math.sqrt(-log(min(share, 1.0 - share)))
    parts, rest = (_OUTER, root - 1.6) if root <= 5.0 else (_OUTMOST, root - 5.0)
    score = _polynomial(parts[0], rest) / _polynomial(parts[1], rest)
    return -score if from_middle < 0 else score


def normal_quantiles(shares: FloatArray) -> FloatArray:
    """`normal_quantile` of each share of an array."""
    shares = np.asarray(shares, dtype=np.float64)
    from_middle = shares - 0.5
    rest = 0.180625 - from_middle * from_middle
    found = from_middle * (_polynomial(_MIDDLE[0], rest) / _polynomial(_MIDDLE[1], rest))
    is_tail = np.abs(from_middle) > 0.425
    tails = shares[is_tail]
    root = np.sqrt(-logs(np.minimum(tails, 1.0 - tails)))
    rest = root - 1.6
    score = _polynomial(_OUTER[0], rest) / _polynomial(_OUTER[1], rest)
    is_outmost = root > 5.0
    rest = root[is_outmost] - 5.0
    score[is_outmost] = _polynomial(_OUTMOST[0], rest) / _polynomial(_OUTMOST[1], rest)
    found[is_tail] = np.where(from_middle[is_tail] < 0, -score, score)
    return found


# -- sums and tables -----------------------------------------------------------------------


def total(values: FloatArray, axis: int = -1) -> FloatArray:
    """Sums along one axis. Each sum is added from the first element to the last, as a running sum
    is; `np.sum` may choose another order."""
    return np.asarray(np.cumsum(values, axis=axis, dtype=np.float64).take(-1, axis=axis))


def total_of(values: FloatArray) -> float:
    """Sum of all elements of an array, added one by one in memory order (last axis fastest)."""
    return float(total(values.reshape(-1))) if values.size else 0.0


def mean(values: FloatArray, axis: int = -1) -> FloatArray:
    """Means along one axis, of elements added from the first to the last."""
    return np.asarray(total(values, axis) / values.shape[axis])


def mixed(weights: FloatArray, rows: FloatArray) -> FloatArray:
    """(B,) sum of the `rows` (C, B), each multiplied by its weight (C,), as `weights @ rows`."""
    return total(weights[:, np.newaxis] * rows, axis=0)


def dot(rows: FloatArray, values: FloatArray) -> FloatArray:
    """Inner products along the last axis, `rows @ values`, of (..., B) with (B,)."""
    return total(rows * values)


def to_grid(values: FloatArray, most: float) -> FloatArray:
    """Rounds the values to multiples of a power of two, so that sums of them, each times a whole
    number (0 or more), are exact in any order as long as those whole numbers add up to no more than
    `most`. At most 2**-52 of the largest possible sum is lost."""
    if not values.size:
        return values
    largest = max(float(values.max()), -float(values.min()))
    bits = math.frexp(largest)[1] + math.frexp(max(most, 1.0))[1]
    grid = math.ldexp(1.0, bits - 52)
    return np.asarray(np.rint(values / grid) * grid)


def interpolated(
    x: FloatArray | NDArray[np.int64],
    known_x: FloatArray,
    known_y: FloatArray,
    *,
    below: float | None = None,
    above: float | None = None,
) -> FloatArray:
    """Linear interpolation at `x` between points (`known_x`, `known_y`) with ascending `known_x`.
    `below` and `above`: values outside of these. None: the value of the first or last point."""
    at = np.clip(np.searchsorted(known_x, x, side="right") - 1, 0, max(known_x.size - 2, 0))
    after = np.minimum(at + 1, known_x.size - 1)
    width = known_x[after] - known_x[at]
    slope = (known_y[after] - known_y[at]) / np.where(width > 0, width, 1.0)
    inside = np.clip(x, known_x[0], known_x[-1])
    found = (inside - known_x[at]) * slope + known_y[at]
    found = np.where(x >= known_x[-1], known_y[-1], found)
    found = np.where(x <= known_x[0], known_y[0], found)
    if below is not None:
        found = np.where(x < known_x[0], below, found)
    if above is not None:
        found = np.where(x > known_x[-1], above, found)
    return np.asarray(found, dtype=np.float64)
