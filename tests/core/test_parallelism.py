"""The parallelism planner against invented preemption counts."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.core.commands import RoundKind
from rollpacker.core.fleet.parallelism import ParallelismConfig, ParallelismPlanner

SHORT, LONG = RoundKind.SHORT, RoundKind.LONG
NUM_SAMPLES = {SHORT: 1600, LONG: 1024}
DEGREES = (1, 2, 4, 8)


def planner_of(initial: int = 1, **changes) -> ParallelismPlanner:
    config = ParallelismConfig(enabled=True, degrees=DEGREES, initial=initial, **changes)
    return ParallelismPlanner(config)


def feed(planner: ParallelismPlanner, *counts: int, kind: RoundKind = SHORT) -> list[int]:
    """Rounds with so many preemptions; the degrees that followed."""
    degrees = []
    for count in counts:
        planner.observe(kind, preemptions=count, num_samples=NUM_SAMPLES[kind])
        degrees.append(planner.degree(kind))
    return degrees


def test_doubles_on_a_jump():
    # The first round at 4 has fewer than the last at 2, the second rises again.
    assert feed(planner_of(2), 0, 0, 800, 700, 800) == [2, 2, 4, 4, 8]


def test_halves_after_four_calm_rounds():
    assert feed(planner_of(4), *[0] * 9) == [4, 4, 4, 2, 2, 2, 2, 1, 1]


def test_one_preemption_breaks_the_calm_but_is_no_rise():
    assert feed(planner_of(4), 0, 0, 0, 1, 0, 0, 0, 0) == [4, 4, 4, 4, 4, 4, 4, 2]


def test_a_rise_must_exceed_the_factor_and_the_floor():
    # 5 % of 800 are 40 and the floor is 16 of 1600 samples.
    assert feed(planner_of(2), 16) == [2]
    assert feed(planner_of(2), 17) == [4]
    assert feed(planner_of(8), 800)[-1] == 8
    planner = planner_of(1)
    assert feed(planner, 800, 856, 915) == [2, 2, 4]


def test_the_highest_and_the_lowest_degree_are_kept():
    assert feed(planner_of(8), 10, 1000, 100_000) == [8, 8, 8]
    assert feed(planner_of(1), *[0] * 10) == [1] * 10


def test_kinds_differ():
    """The published counts of an 8B model with 32k tokens: short rounds go to degree 2 and stay
    there although they still preempt; long rounds preempt less per sample and stay at 1."""
    planner = planner_of(1)
    counts = {(SHORT, 1): 5199, (SHORT, 2): 4102, (LONG, 1): 2900, (LONG, 2): 2601}
    for _ in range(5):
        for kind in (SHORT, SHORT, SHORT, SHORT, LONG):
            feed(planner, counts[kind, planner.degree(kind)], kind=kind)
    assert planner.degree(SHORT) == 2
    assert planner.degree(LONG) == 1
    assert planner.num_changes == 1


def test_a_failed_degree_is_tried_again_later_and_later():
    planner = planner_of(1)
    waits, calm = [], 0
    for _ in range(300):
        before = planner.degree(SHORT)
        (after,) = feed(planner, 500 if before == 1 else 0)
        calm = calm + 1 if before == 2 else 0
        if (before, after) == (2, 1):
            waits.append(calm)
    assert waits == [16, 32, 64, 128]


@st.composite
def stationary(draw):
    """Preemptions per kind and degree; any function of the degree."""
    counts = st.one_of(st.just(0), st.integers(0, 10_000))
    return {(kind, degree): draw(counts) for kind in (SHORT, LONG) for degree in DEGREES}


@settings(deadline=None)
@given(stationary(), st.sampled_from(DEGREES))
def test_a_constant_workload_sees_a_finite_number_of_changes(counts, initial):
    planner = planner_of(initial, calm_rounds=1)
    last_change = 0
    for number in range(6000):
        kind = LONG if number % 5 == 4 else SHORT
        before = planner.num_changes
        feed(planner, counts[kind, planner.degree(kind)], kind=kind)
        if planner.num_changes != before:
            last_change = number
    assert last_change < 4000
    assert planner.num_changes <= 2 * 3 * 2 * 8


@given(
    st.lists(st.tuples(st.sampled_from((SHORT, LONG)), st.integers(0, 5000)), max_size=60),
    st.sampled_from(DEGREES),
)
def test_degrees_stay_among_those_given_and_move_one_at_a_time(rounds, initial):
    planner = planner_of(initial, calm_rounds=2)
    for kind, count in rounds:
        before = planner.degree(kind)
        (after,) = feed(planner, count, kind=kind)
        assert abs(DEGREES.index(after) - DEGREES.index(before)) <= 1


@given(
    st.lists(st.tuples(st.sampled_from((SHORT, LONG)), st.integers(0, 50)), max_size=40),
    st.lists(st.tuples(st.sampled_from((SHORT, LONG)), st.integers(0, 50)), max_size=40),
)
def test_a_restored_planner_goes_on_alike(before, after):
    planner = planner_of(2, calm_rounds=1)
    for kind, count in before:
        feed(planner, count, kind=kind)
    other = planner_of(2, calm_rounds=1)
    other.restore(json.loads(json.dumps(planner.state())))
    for kind, count in after:
        assert feed(planner, count, kind=kind) == feed(other, count, kind=kind)
    assert planner.state() == other.state()


def test_a_degree_that_is_no_longer_offered_starts_anew():
    planner = planner_of(4)
    feed(planner, 0, 900)
    fewer = ParallelismPlanner(ParallelismConfig(enabled=True, degrees=(1, 2), initial=2))
    fewer.restore(planner.state())
    assert fewer.degree(SHORT) == 2


def test_switched_off_it_keeps_the_initial_degree():
    planner = ParallelismPlanner(ParallelismConfig(degrees=(1, 2), initial=1))
    assert feed(planner, 0, 5000, 9000) == [1, 1, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"degrees": ()}, "degrees"),
        ({"degrees": (0, 1)}, "degrees"),
        ({"degrees": (2, 1)}, "ascend"),
        ({"degrees": (1, 1)}, "ascend"),
        ({"degrees": (2, 4)}, "initial"),
        ({"rise": 0.9}, "rise"),
        ({"rise": float("nan")}, "rise"),
        ({"calm_rounds": 0}, "calm_rounds"),
    ],
)
def test_bad_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ParallelismConfig(**changes)
