"""What a job's iterations teach the cluster: drift is followed, noise moves nobody."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

import pytest
from msgspec.structs import replace

from rollpacker.cluster.decide.cheapest_work import CheapestWork
from rollpacker.cluster.decide.events import Committed, Ended, Start, Submitted
from rollpacker.cluster.decide.group import Sharing
from rollpacker.cluster.decide.job import ClusterJob, RoundTimes, Times
from rollpacker.cluster.decide.learned import MATERIAL, WINDOW, LearnedTimes
from tests.core.test_cluster import POOLS, Watched
from tests.core.test_coexecution import job

SPREAD = (0.85, 0.95, 1.0, 1.05, 1.15)


def spread_job(seconds: float) -> ClusterJob:
    """Iterations that vary by a tenth."""
    lengths = tuple(seconds * one for one in SPREAD)
    return replace(job("a", 1, 1), rounds=(RoundTimes(rollout_s=lengths, train_s=lengths),))


def learn(one: ClusterJob, seen: Iterator[Times]) -> list[ClusterJob]:
    """What it was known as, at the begin and after each change."""
    learned = LearnedTimes(one)
    known = [one]
    for times in seen:
        changed = learned.saw("plain", times)
        if changed is not None:
            known.append(changed)
    return known


def drawn(one: ClusterJob, count: int, grows_to: float = 1.0) -> Iterator[Times]:
    rng = random.Random("lengths")
    for number in range(count):
        yield one.draw(rng.random(), rng.random()).longer(1 + (grows_to - 1) * number / count)


def test_noise_changes_nothing() -> None:
    one = spread_job(100)
    assert learn(one, drawn(one, 2_000)) == [one]


def test_lengths_that_grow_are_followed() -> None:
    one = spread_job(100)
    known = learn(one, drawn(one, 300, grows_to=1.3))
    means = [math.fsum(job.mean) for job in known]
    assert means == sorted(means)
    assert 3 <= len(known) <= 9, "not at every iteration"
    assert means[-1] == pytest.approx(1.3 * means[0], rel=0.07)


def test_a_profile_that_is_wrong_has_faded_after_a_window() -> None:
    one = job("a", 100, 100)
    known = learn(one, iter([Times(250.0, 10.0, 40.0, 5.0)] * WINDOW))
    assert len(known) > 2
    near = MATERIAL * 305
    assert [*known[-1].mean] == pytest.approx([250.0, 10.0, 40.0, 5.0], abs=near)


def test_kinds_that_the_profile_does_not_know_get_their_share() -> None:
    learned = LearnedTimes(job("a", 100, 100))
    known: Sequence[ClusterJob] = []
    for number in range(2 * WINDOW):
        kind, seconds = ("long", 400.0) if number % 4 == 0 else ("short", 60.0)
        changed = learned.saw(kind, Times(seconds, 0.0, seconds, 0.0))
        known = known if changed is None else [*known, changed]
    shares = {one.kind: one.share for one in known[-1].rounds}
    assert shares["long"] == pytest.approx(0.25, abs=0.05)
    assert math.fsum(shares.values()) == pytest.approx(1)


def test_the_same_iterations_teach_the_same() -> None:
    one = spread_job(100)
    assert learn(one, drawn(one, 200, 1.5)) == learn(one, drawn(one, 200, 1.5))


def test_what_is_seen_on_other_nodes_is_told_in_seconds_of_the_profile() -> None:
    sharing = Sharing(rollout_scale=2.0, train_scale=0.5, publish_s=7.0)
    times = Times(100.0, 3.0, 80.0, 2.0)
    assert sharing.here(times) == (200.0, 3.0, 47.0, 2.0)
    assert sharing.alone(sharing.here(times)) == times


@pytest.mark.parametrize("learns", [True, False])
def test_a_job_that_has_grown_is_parted_from_one_whose_promise_it_endangers(learns: bool) -> None:
    """Two jobs of 100 + 100 s fill each other's waits, until one takes twice as long."""
    watched = Watched(CheapestWork(learns=learns))
    for name in "ab":
        one = watched.jobs[name] = job(name, 100, 100, 1.3, cold_start_s=1.0)
        watched.tell(Submitted(0.0, one))
    assert watched.on["a"].group == watched.on["b"].group
    starts = [
        command
        for number in range(1, 41)
        for name, seconds in (("a", 100.0), ("b", 200.0))
        for command in watched.tell(
            Committed(220.0 * number, name, 2 * seconds, Times(seconds, 0.0, seconds, 0.0))
        )
        if isinstance(command, Start)
    ]
    assert bool(starts) == learns
    assert (watched.on["a"].group != watched.on["b"].group) == learns


def test_what_a_moved_job_has_waited_so_far_is_known_in_its_new_group() -> None:
    watched = Watched(CheapestWork(), POOLS)
    for name in "abc":
        one = watched.jobs[name] = job(name, 100, 100, 1.1, cold_start_s=50.0)
        watched.tell(Submitted(0.0, one))
    watched.tell(Ended(1.0, "a"))
    (start,) = (one for one in watched.tell(Committed(210.0, "c", 200.0)) if isinstance(one, Start))
    assert start.group == watched.on["b"].group
    rest = watched.cluster.state.groups[start.group].rest["c"]
    assert rest.spare_s == pytest.approx(1.1 * 200 - 210 - 50)
