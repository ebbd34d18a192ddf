"""`core/portable.py` against the C library, numpy and exact arithmetic.

That it gives the same bits on every processor is shown by `tests/golden/test_processors.py`.
"""

from __future__ import annotations

import ast
import inspect
import math
import random
from collections.abc import Callable
from fractions import Fraction
from statistics import NormalDist

import numpy as np
import pytest

from rollpacker.core import portable
from rollpacker.core.portable import FloatArray

RANDOM = random.Random(27)
ALL = np.array([RANDOM.uniform(-700, 700) for _ in range(4000)] + [0.0, -0.0, 1.0, -1.0, 1e-300])
POSITIVE = np.array(
    [math.ldexp(RANDOM.uniform(0.5, 1), RANDOM.randint(-1000, 1000)) for _ in range(4000)]
    + [1.0, 2.0, 0.5, 1.0 + 2**-52, 1.0 - 2**-53, math.sqrt(0.5), 1e-300]
)
SHARES = np.array([RANDOM.random() for _ in range(4000)] + [1e-300, 1e-17, 0.5, 1 - 2**-53])
SCORES = np.array([RANDOM.uniform(-9, 9) for _ in range(4000)] + [0.0, 2.5, -2.5, 39.0, -39.0])


def relative(found: FloatArray, expected: FloatArray) -> float:
    return float(np.max(np.abs(found - expected) / np.maximum(np.abs(expected), 1e-300)))


def test_exponential_and_logarithm() -> None:
    assert relative(portable.exps(ALL), np.array([math.exp(x) for x in ALL])) < 4e-16
    expected = np.array([math.log(x) for x in POSITIVE])
    assert np.all(np.abs(portable.logs(POSITIVE) - expected) <= 4e-16 * np.abs(expected) + 1e-16)
    small = np.array([math.copysign(10 ** RANDOM.uniform(-20, -0.01), x) for x in ALL])
    assert relative(portable.log1ps(small), np.array([math.log1p(x) for x in small])) < 1e-15
    assert portable.exps(np.array([-1e9, -math.inf, 0.0])).tolist() == [0.0, 0.0, 1.0]


def test_powers() -> None:
    for base, exponent in ((7.6, 0.47), (0.3, 2.5), (32.0, -0.9)):
        assert portable.power(base, exponent) == pytest.approx(base**exponent, rel=2e-15)
    for exponent in range(12):
        exact = float(Fraction(0.9) ** exponent)
        assert portable.power(0.9, exponent) == pytest.approx(exact, rel=1e-15)
    assert portable.power(0.0, 0) == 1.0
    assert portable.power(-2.0, 3) == -8.0


def test_points_on_the_circle() -> None:
    turns = SHARES[SHARES < 1]
    cosine, sine = portable.on_circle(turns)
    assert np.max(np.abs(cosine - np.cos(2 * np.pi * turns))) < 1e-15
    assert np.max(np.abs(sine - np.sin(2 * np.pi * turns))) < 1e-15
    assert np.max(np.abs(cosine * cosine + sine * sine - 1)) < 1e-15


def test_the_normal_distribution() -> None:
    found = portable.normal_cdfs(SCORES)
    exact = np.array([0.5 * math.erfc(-x / math.sqrt(2)) for x in SCORES])
    assert np.max(np.abs(found - exact)) < 4e-16
    assert relative(found, exact) < 2e-13
    quantiles = np.array([NormalDist().inv_cdf(share) for share in SHARES])
    assert np.allclose(portable.normal_quantiles(SHARES), quantiles, rtol=2e-15, atol=1e-16)


@pytest.mark.parametrize(
    ("one", "many", "values"),
    [
        (portable.exp, portable.exps, np.append(ALL, [-800.0, 800.0])),
        (portable.log, portable.logs, POSITIVE),
        (portable.log1p, portable.log1ps, SHARES),
        (portable.normal_cdf, portable.normal_cdfs, SCORES),
        (portable.normal_quantile, portable.normal_quantiles, SHARES),
    ],
    ids=["exp", "log", "log1p", "normal_cdf", "normal_quantile"],
)
def test_one_number_and_an_array_give_the_same_bits(
    one: Callable[[float], float], many: Callable[[FloatArray], FloatArray], values: FloatArray
) -> None:
    assert [one(value) for value in values.tolist()] == many(values).tolist()


def test_sums_and_products() -> None:
    rows = np.array([[RANDOM.gauss(0, 1) for _ in range(37)] for _ in range(5)])
    weights = np.array([0.1, 0.2, 0.3, 0.2, 0.2])
    in_order = [0.0] * 5
    for column in range(37):
        in_order = [before + float(rows[n, column]) for n, before in enumerate(in_order)]
    assert portable.total(rows, axis=1).tolist() == in_order
    assert np.allclose(portable.total(rows, axis=0), rows.sum(axis=0), rtol=1e-12)
    assert portable.total_of(rows) == pytest.approx(math.fsum(rows.ravel()), rel=1e-12)
    assert portable.total_of(np.empty(0)) == 0.0
    assert np.allclose(portable.mixed(weights, rows), weights @ rows, rtol=1e-12, atol=1e-14)
    assert np.allclose(portable.dot(rows, rows[0]), rows @ rows[0], rtol=1e-12, atol=1e-14)
    assert np.allclose(portable.mean(rows, 0), rows.mean(axis=0), rtol=1e-12, atol=1e-14)


def test_sums_on_a_grid_are_exact_in_any_order() -> None:
    values = np.array([RANDOM.uniform(-690, 0) for _ in range(300)])
    counts = [RANDOM.randint(0, 40) for _ in values]
    gridded = portable.to_grid(values, sum(counts))
    exact = sum(
        (Fraction(v) * c for v, c in zip(gridded.tolist(), counts, strict=True)), Fraction()
    )
    for _ in range(20):
        order = RANDOM.sample(range(len(counts)), len(counts))
        found = 0.0
        for n in order:
            found += float(gridded[n]) * counts[n]
        assert Fraction(found) == exact
    assert Fraction(float(gridded @ np.array(counts, dtype=float))) == exact
    assert np.max(np.abs(gridded - values)) <= 690 * sum(counts) * 2.0**-52


def test_interpolation() -> None:
    known_x = np.array([0.0, 0.5, 0.5, 2.0, 7.0])
    known_y = np.array([1.0, 3.0, 4.0, -2.0, 5.0])
    x = np.array([-1.0, 0.0, 0.2, 0.4999, 0.5, 0.7, 2.0, 6.0, 7.0, 9.0])
    found = portable.interpolated(x, known_x, known_y)
    assert np.allclose(found, np.interp(x, known_x, known_y), rtol=1e-14)
    found = portable.interpolated(x, known_x, known_y, below=-7.0, above=9.0)
    assert np.allclose(found, np.interp(x, known_x, known_y, left=-7.0, right=9.0), rtol=1e-14)
    assert portable.interpolated(x, known_x[:1], known_y[:1]).tolist() == [1.0] * x.size


def test_nothing_that_a_library_may_round_otherwise_is_called() -> None:
    """The module itself must be made of what it promises."""
    allowed = {"frexp", "ldexp", "sqrt", "pi", "factorial"}
    tree = ast.parse(inspect.getsource(portable))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "math"
    }
    assert used <= allowed
