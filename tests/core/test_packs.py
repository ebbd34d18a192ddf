"""Samples on ranks: each once, by work and not by number, near the best there is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.core.packs import WorkModel, assign, work

LENGTHS = st.lists(st.integers(1, 20_000), max_size=40)


def loads(lengths: list[int], shares: list[list[int]]) -> list[float]:
    return [sum(work(lengths[i]) for i in share) for share in shares]


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(1, 9))
def test_every_sample_has_one_rank_and_no_rank_has_much_more_than_the_mean(lengths, num_ranks):
    shares = assign(lengths, num_ranks)
    assert len(shares) == num_ranks
    assert sorted(itertools.chain(*shares)) == list(range(len(lengths)))
    assert all(share == sorted(share) for share in shares)
    assert assign(list(lengths), num_ranks) == shares
    costs = [work(length) for length in lengths]
    if lengths:
        # Graham's bound; so within 4/3 of the mean if no row is more than a third of it. In general
        # nobody comes that near to the mean or the longest: seven equal rows on six ranks.
        largest, mean = max(loads(lengths, shares)), sum(costs) / num_ranks
        assert largest <= mean + (1 - 1 / num_ranks) * max(costs) + 1e-6
        if max(costs) <= mean / 3:
            assert largest <= 4 / 3 * mean
        if len(lengths) <= num_ranks:
            assert largest == max(costs) and sum(map(bool, shares)) == len(lengths)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9000), min_size=1, max_size=7), st.integers(1, 3))
def test_within_four_thirds_of_the_best(lengths, num_ranks):
    """By trying every assignment."""
    costs = [work(length) for length in lengths]
    best = min(
        max(sum(c for c, r in zip(costs, ranks, strict=True) if r == rank) for rank in ranks)
        for ranks in itertools.product(range(num_ranks), repeat=len(costs))
    )
    largest = max(loads(lengths, assign(lengths, num_ranks)))
    assert largest <= (4 / 3 - 1 / (3 * num_ranks)) * best * (1 + 1e-12)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_a_step_with_a_tail_is_balanced_by_work_not_by_number(num_ranks):
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(np.log(500), 1.1, 512), 2, 16_000).astype(int).tolist()
    shares = assign(lengths, num_ranks)
    ours = loads(lengths, shares)
    by_number = loads(lengths, [list(range(r, 512, num_ranks)) for r in range(num_ranks)])
    mean = sum(ours) / num_ranks
    assert max(ours) < 1.005 * mean
    assert max(by_number) > 1.03 * mean


def test_attention_counts():
    """One row of 8,000 is more work than two of 4,000."""
    lengths = [8000, 4000, 4000, 4000, 4000]
    assert assign(lengths, 2, work=float) == [[0, 3], [1, 2, 4]]
    heavy = WorkModel(crossover_tokens=1000)
    assert heavy(8000) == pytest.approx(8000 + 64_000)
    assert assign(lengths, 2, work=heavy) == [[0], [1, 2, 3, 4]]
