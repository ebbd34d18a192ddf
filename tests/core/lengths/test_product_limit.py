"""The product-limit mean against hand-made cases."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.lengths.product_limit import kaplan_meier_mean

LENGTHS = st.lists(st.integers(1, 40), max_size=30)


def test_without_censoring_it_is_the_mean():
    assert kaplan_meier_mean([1, 2, 3, 10], []) == pytest.approx(4.0)


def test_a_textbook_case():
    # At 2: 1 of 4 ends. One is stopped at 3. At 5: 1 of 2 ends. At 7 the last one ends.
    # Area: 2 * 1 + 3 * 3/4 + 2 * 3/8.
    assert kaplan_meier_mean([2, 5, 7], [3]) == pytest.approx(2 + 2.25 + 0.75)


def test_of_equal_lengths_the_stopped_one_is_longer():
    assert kaplan_meier_mean([4, 8], [4]) == pytest.approx(4 + 4 * 2 / 3)


def test_the_curve_stays_level_up_to_the_cap():
    assert kaplan_meier_mean([2], [2], cap=10) == pytest.approx(2 + 8 * 0.5)
    assert kaplan_meier_mean([2, 20], [], cap=10) == pytest.approx(2 + 8 * 0.5)


@pytest.mark.parametrize(("finished", "cap"), [([], None), ([1], 0)])
def test_nothing_to_estimate_from_is_an_error(finished, cap):
    with pytest.raises(ValueError, match=r"lengths|cap"):
        kaplan_meier_mean(finished, [], cap)


@given(LENGTHS, LENGTHS, st.one_of(st.none(), st.integers(1, 60)))
def test_it_lies_between_taking_stops_for_ends_and_the_cap(finished, censored, cap):
    both = finished + censored
    if not both:
        return
    limit = max(both) if cap is None else cap
    mean = kaplan_meier_mean(finished, censored, cap)
    assert math.fsum(min(n, limit) for n in both) / len(both) <= mean + 1e-9
    assert mean <= limit + 1e-9


def test_random_stops_are_seen_through():
    """Stop times that know nothing of the lengths: the estimate finds the mean, the plain mean does
    not."""
    rng = random.Random(0)
    lengths = [rng.randint(1, 100) for _ in range(20_000)]
    stops = [rng.randint(1, 150) for _ in lengths]
    finished = [n for n, stop in zip(lengths, stops, strict=True) if n <= stop]
    censored = [stop for n, stop in zip(lengths, stops, strict=True) if n > stop]
    assert kaplan_meier_mean(finished, censored) == pytest.approx(50.5, rel=0.02)
    assert sum(finished) / len(finished) < 45
