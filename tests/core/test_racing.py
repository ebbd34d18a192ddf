"""`tail_batching.carry: auto`: how many carried tokens are verified, and whether rounds race."""

from __future__ import annotations

import json
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.core.rounds.carry_limit import LEAST_VERIFIED, CarriedCounts, CarryLimit
from rollpacker.core.rounds.racing import (
    CLEARLY_FASTER,
    ENOUGH_DIFFERENT,
    PROBE_EVERY,
    RACES_AT_LEAST,
    TRIAL_AFTER,
    TRIAL_ROUNDS,
    Racing,
)

LONGEST = 16_384


def carried_round(
    dice: random.Random, distance: float, most: int | None, num_samples: int = 200
) -> CarriedCounts:
    """What came of responses of 1 to 8,000 carried tokens, which differ `distance` apart."""
    tokens = same = verified = different = 0
    for _ in range(num_samples):
        carried = dice.randint(1, 8000)
        kept = min(carried, int(dice.expovariate(1 / distance)))
        passed = carried if most is None else min(carried, most)
        tokens, same = tokens + carried, same + kept
        verified += min(kept + 1, passed)
        different += kept < passed
    return CarriedCounts(tokens, same, verified, different)


def limit_after(limit: CarryLimit, distance: float, seed: int, num_rounds: int = 12) -> int | None:
    dice = random.Random(seed)
    for _ in range(num_rounds):
        limit.observe(carried_round(dice, distance, limit.most_verified))
    return limit.most_verified


@settings(max_examples=60, deadline=None)
@given(distance=st.floats(20, 3000), seed=st.integers(0, 1000))
def test_the_limit_is_some_mean_distances_between_tokens_that_differ(
    distance: float, seed: int
) -> None:
    found = limit_after(CarryLimit(LONGEST, follows=True), distance, seed)
    assert found is not None and 1.4 * distance < found < 8.8 * distance
    assert found.bit_count() == 1


@given(distance=st.floats(2e6, 1e9), seed=st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_where_tokens_hardly_ever_differ_there_is_no_limit(distance: float, seed: int) -> None:
    assert limit_after(CarryLimit(LONGEST, follows=True), distance, seed) is None


@given(distance=st.floats(0.1, 4), seed=st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_the_limit_is_never_so_small_that_nothing_is_seen(distance: float, seed: int) -> None:
    limit = CarryLimit(LONGEST, follows=True)
    assert limit_after(limit, distance, seed) == LEAST_VERIFIED
    assert limit_after(limit, 1e8, seed, num_rounds=40) is None, "it goes when tokens stay the same"


@given(seed=st.integers(0, 1000), at=st.integers(0, 20))
@settings(max_examples=20, deadline=None)
def test_a_restored_limit_goes_on_as_the_first(seed: int, at: int) -> None:
    distances = [random.Random(seed + n).choice((30, 1000, 1e7)) for n in range(30)]
    first, second = (CarryLimit(LONGEST, follows=True) for _ in range(2))
    for number, distance in enumerate(distances):
        if number == at:
            second.restore(json.loads(json.dumps(first.state())))
        counts = carried_round(random.Random(number), distance, first.most_verified, 20)
        first.observe(counts)
        if number >= at:
            second.observe(counts)
            assert second.most_verified == first.most_verified
    assert second.state() == first.state()


def test_a_limit_knows_nothing_of_a_run_that_has_none() -> None:
    limit = CarryLimit(None, follows=False)
    assert limit.state() == {}
    saved = CarryLimit(None, follows=True)
    limit_after(saved, 50, 0)
    limit.restore(saved.state())
    assert limit.most_verified is None
    saved.restore({})  # of a checkpoint from before there were limits
    assert saved.most_verified is not None


# -- whether rounds race -------------------------------------------------------------


class Course:
    """A run of rounds: seconds and mismatches as given, until told otherwise."""

    def __init__(
        self, race_s: float, wait_s: float, share: float = 0.1, last_s: float | None = None
    ) -> None:
        """`last_s`: of a round that waits for what races deferred; None: as of a race."""
        self.racing = Racing(follows=True)
        self.race_s, self.wait_s, self.share = race_s, wait_s, share
        self.last_s = race_s if last_s is None else last_s
        self.deferred = False
        self.raced: list[bool] = []

    def play(self, num_rounds: int) -> list[bool]:
        """Whether each of so many rounds raced."""
        start = len(self.raced)
        for _ in range(num_rounds):
            races = self.racing.races
            counts = CarriedCounts()
            if self.deferred:
                different = round(1000 * self.share)
                counts = CarriedCounts(10_000, max(0, 10_000 - 50 * different), 10_000, different)
            seconds = self.race_s if races else self.last_s if self.deferred else self.wait_s
            self.deferred = races
            self.raced.append(races)
            self.racing.observe(64, seconds, counts)
        return self.raced[start:]


@given(race_s=st.integers(1, 100), wait_s=st.integers(1, 100))
def test_a_trial_takes_the_faster_way(race_s: int, wait_s: int) -> None:
    course = Course(race_s, wait_s)
    # The first of the trial's rounds has what the last race deferred, and does not count.
    assert course.play(TRIAL_AFTER + 1 + TRIAL_ROUNDS) == [True] * TRIAL_AFTER + [False] * 4
    assert course.racing.races == (wait_s > CLEARLY_FASTER * race_s)
    if course.racing.races:
        assert all(course.play(RACES_AT_LEAST)) and not all(course.play(1))


@given(last_s=st.integers(1, 100))
def test_what_races_put_off_is_part_of_what_they_take(last_s: int) -> None:
    course = Course(race_s=5, wait_s=10, last_s=last_s)
    course.play(TRIAL_AFTER + 1 + TRIAL_ROUNDS)
    race_s = (TRIAL_AFTER * 5 + last_s) / (TRIAL_AFTER + 1)
    assert course.racing.races == (CLEARLY_FASTER * race_s < 10)


@given(share=st.floats(0, 1), factor=st.sampled_from((0.1, 0.4, 0.6, 1.0, 2.0)))
def test_who_waits_probes_now_and_then_and_races_again_if_less_differs(
    share: float, factor: float
) -> None:
    course = Course(2.0, 1.0, share=0.2)
    course.play(TRIAL_AFTER + 1 + TRIAL_ROUNDS)
    assert course.racing.state == "waiting"
    course.share = 0.2 * factor
    assert course.play(PROBE_EVERY + 2) == [False] * PROBE_EVERY + [True, False]
    assert course.racing.races == (factor < 0.5)
    again = course.play(200)
    assert sum(again) < 5 or factor < 0.5


@given(share=st.floats(0, 0.04))
def test_a_run_whose_tokens_stay_races_whatever_it_takes(share: float) -> None:
    course = Course(9.0, 1.0, share=share / 5)
    assert all(course.play(300))


def test_a_few_that_differ_are_no_reason_for_a_trial() -> None:
    racing = Racing(follows=True)
    for _ in range(100):
        racing.observe(64, 1.0, CarriedCounts(100, 0, 100, 0))
    racing = Racing(follows=True)
    for number in range(ENOUGH_DIFFERENT - 1):
        racing.observe(64, 1.0, CarriedCounts(100, 0, 100, 1))
        assert racing.races, number


@given(seed=st.integers(0, 1000), at=st.integers(0, 400))
@settings(max_examples=30, deadline=None)
def test_restored_it_decides_as_the_first(seed: int, at: int) -> None:
    def one(number: int) -> tuple[int, float, CarriedCounts]:
        dice = random.Random(f"{seed} {number}")
        different = dice.choice((0, 0, 3, 30))
        same = 1000 - 9 * different
        return 64, dice.choice((1.0, 2.0)), CarriedCounts(1000, same, 1000 - different, different)

    first, second = Racing(follows=True), Racing(follows=True)
    states = set()
    for number in range(at, at + 300):
        if number == at + seed % 250:
            second.restore(json.loads(json.dumps(first.saved())))
        first.observe(*one(number))
        states.add(first.state)
        if number >= at + seed % 250:
            second.observe(*one(number))
            assert (second.state, second.rounds_left) == (first.state, first.rounds_left)
    assert second.saved() == first.saved() and len(states) > 1
