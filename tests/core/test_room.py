"""Room for a job that waits for nodes: others move, are stopped, or may be joined."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.cluster.decide.cheapest_work import CheapestWork
from rollpacker.cluster.decide.events import Asked, Committed, Ended, Left, Start, Stop, Submitted
from rollpacker.cluster.decide.forecast import Rest
from rollpacker.cluster.decide.job import ClusterJob
from rollpacker.cluster.decide.nodes import Pool
from rollpacker.cluster.decide.room import bearable
from tests.core.test_cluster import PHASES, Command, Grant, Watched
from tests.core.test_coexecution import H20, H800, job

H = 3600.0


def pairs(count: int) -> tuple[Pool, Pool]:
    return replace(H20, nodes=count), replace(H800, nodes=count)


PAIR, TWO_PAIRS = pairs(1), pairs(2)


def come(watched: Watched, at_s: float, one: ClusterJob) -> list[Command]:
    watched.jobs[one.name] = one
    return watched.tell(Submitted(at_s, one))


def iterate(watched: Watched, at_s: float, name: str) -> list[Command]:
    """The job rolls out and trains, and has just committed."""
    for phase in PHASES:
        (grant,) = watched.tell(Asked(at_s, name, phase))
        assert isinstance(grant, Grant)
        watched.tell(Left(at_s, name, phase, grant.token))
    return watched.tell(Committed(at_s, name, sum(watched.jobs[name].mean)))


def starts(commands: list[Command]) -> list[str]:
    return [one.job for one in commands if isinstance(one, Start)]


def crowded(makes_room: bool = True, **settings: float) -> Watched:
    """Two jobs have a rollout node each and one training node together, and may be no more; a third
    waits for a rollout node, while a training node is idle."""
    watched = Watched(CheapestWork(makes_room=makes_room), TWO_PAIRS)
    watched.cluster.state.max_group = 2
    for name in "abc":
        come(
            watched,
            0.0,
            job(name, 100, 40, 1.3 if name == "b" else 1.6, **{"cold_start_s": 100.0} | settings),
        )
    assert watched.cluster.waiting == ["c"] and len(watched.open) == 3
    return watched


def test_a_job_moves_so_that_one_that_waits_fits() -> None:
    watched = crowded()
    assert sorted(starts(iterate(watched, 240.0, "b"))) == ["b", "c"]
    assert not watched.cluster.waiting and len(watched.open) == 4
    assert starts(iterate(watched, 500.0, "b")) == [], "and nobody goes back"


@pytest.mark.parametrize(
    ("makes_room", "more"),
    [(False, {}), (True, {"cold_start_s": 7_500.0}), (True, {"cold_start_s": 5_000.0})],
    ids=["a policy without", "a job ends sooner than a restart pays", "a promise would be broken"],
)
def test_a_job_stays_where_room_is_not_worth_it(makes_room: bool, more: dict[str, float]) -> None:
    """100 iterations of 140 s are 3.9 hours, and an SLO of 1.3 lets b wait for 1.2."""
    watched = crowded(makes_room, **more)
    assert iterate(watched, 240.0, "b") == []
    assert watched.cluster.waiting == ["c"]


def test_what_was_tried_out_leaves_no_trace() -> None:
    watched = crowded(cold_start_s=5_000.0)
    state = watched.cluster.state
    before = {number: standing.layout for number, standing in state.groups.items()}
    free = [state.nodes.num_free(pool.name) for pool in TWO_PAIRS]
    iterate(watched, 240.0, "b")
    assert {number: standing.layout for number, standing in state.groups.items()} == before
    assert [state.nodes.num_free(pool.name) for pool in TWO_PAIRS] == free


def test_a_promise_that_waiting_broke_binds_nobody() -> None:
    one = job("a", 100, 100, 1.5)
    left = Rest(-0.4 * 200 * 50, 50)  # it may be slowed down to 1.1 still
    assert bearable(one, left) == left
    assert bearable(one, Rest(-0.6 * 200 * 50, 50)) == Rest(0.0, 50)


@pytest.mark.parametrize("makes_room", [True, False])
def test_who_has_waited_too_long_can_be_joined(makes_room: bool) -> None:
    """It waits for 8 hours of a life of 5.6: its SLO of 2 is broken, whatever comes."""
    watched = Watched(CheapestWork(makes_room=makes_room), PAIR)
    come(watched, 0.0, job("runs", 100, 100, 1.0))
    come(watched, 0.0, job("late", 100, 100, 2.0))
    watched.tell(Ended(8 * H, "runs"))
    iterate(watched, 8 * H + 200, "late")
    come(watched, 8 * H + 300, job("joins", 100, 100, 2.0))
    assert ("joins" in watched.on) == makes_room


@pytest.mark.parametrize("makes_room", [True, False])
def test_a_wait_counts_where_a_job_is_placed(makes_room: bool) -> None:
    """Of two that fill a pair once and a half, one waits two hours of a life of 5.6: its SLO of 1.6
    leaves it 1.25 then, which it cannot have beside the other."""
    watched = Watched(CheapestWork(makes_room=makes_room), PAIR)
    watched.cluster.state.max_group = 2
    for name, slo in (("stays", 3.0), ("ends", 3.0), ("late", 1.6)):
        come(watched, 0.0, job(name, 100, 150 if slo > 2 else 100, slo))
    assert watched.cluster.waiting == ["late"]
    watched.tell(Ended(2 * H, "ends"))
    assert ("late" in watched.on) != makes_room


def alone(name: str, priority: int = 0, cold_start_s: float = 60.0, owner: str = "") -> ClusterJob:
    """A job that shares with nobody, of 5.6 hours."""
    return job(name, 100, 100, 1.0, priority=priority, cold_start_s=cold_start_s, owner=owner)


def stopped(commands: list[Command]) -> list[str]:
    return [one.job for one in commands if isinstance(one, Stop)]


def test_a_job_of_lower_priority_is_stopped_at_its_commit_and_goes_on_later() -> None:
    watched = Watched(CheapestWork(), PAIR)
    come(watched, 0.0, alone("low"))
    assert come(watched, 3.9 * H, alone("high", 1)) == [], "it waits for a commit"
    commands = iterate(watched, 3.9 * H + 200, "low")
    assert stopped(commands) == ["low"] and starts(commands) == ["high"]
    assert watched.cluster.waiting == ["low"]
    assert iterate(watched, 4 * H, "high") == [], "which is never stopped for it"
    assert starts(watched.tell(Ended(5 * H, "high"))) == ["low"]
    assert iterate(watched, 6 * H, "low") == []


@pytest.mark.parametrize(
    ("comes_h", "one"),
    [
        (4.1, alone("high", 1)),
        (1.0, alone("as low")),
        (1.0, alone("lower", -1)),
    ],
    ids=["beyond its head start", "no higher", "lower"],
)
def test_nobody_is_stopped_for_a_job_that_would_come_later(comes_h: float, one: ClusterJob) -> None:
    watched = Watched(CheapestWork(), PAIR)
    come(watched, 0.0, alone("low"))
    come(watched, comes_h * H, one)
    assert iterate(watched, comes_h * H + 200, "low") == []
    assert watched.cluster.waiting == [one.name]


def full(count: int, comes_h: float, one: ClusterJob) -> tuple[Watched, list[str]]:
    """Jobs of nobody have all pairs when another one comes. Who is stopped at their commits."""
    watched = Watched(CheapestWork(), pairs(count))
    for n in range(count):
        come(watched, 0.0, alone(f"low {n}"))
    come(watched, comes_h * H, one)
    assert watched.cluster.waiting == [one.name]
    at_s = comes_h * H + 200
    return watched, [x for n in range(count) for x in stopped(iterate(watched, at_s, f"low {n}"))]


@pytest.mark.parametrize("count", [4, 8])
@pytest.mark.parametrize(("comes_h", "is_made_room_for"), [(0.1, True), (3.9, True), (4.1, False)])
def test_the_head_start_is_whole_where_one_owner_has_all(
    count: int, comes_h: float, is_made_room_for: bool
) -> None:
    """In the queue both would have the same share."""
    watched, victims = full(count, comes_h, alone("high", 1))
    assert len(victims) == is_made_room_for
    assert ("high" in watched.on) == is_made_room_for
    assert watched.cluster.waiting == (victims or ["high"])


@pytest.mark.parametrize("count", [4, 8])
def test_who_has_less_is_more_than_its_head_start_before_who_has_more(count: int) -> None:
    """By the other jobs' share, (count - 1) / count of four hours."""
    for comes_h, is_made_room_for in ((6.9, True), (8.1, False)):
        _, victims = full(count, comes_h, alone("high", 1, owner="bob"))
        assert len(victims) == is_made_room_for
    _, victims = full(count, 0.1, alone("as low", owner="bob"))
    assert victims == [], "without a higher priority nobody is stopped, whoever has more"


def test_nobody_is_stopped_that_ends_sooner_than_its_restart_pays() -> None:
    watched = Watched(CheapestWork(), PAIR)
    come(watched, 0.0, alone("low", cold_start_s=2 * H))
    come(watched, 1.0, alone("high", 1))
    assert iterate(watched, 200.0, "low") == []


def test_the_one_that_came_last_is_stopped() -> None:
    watched = Watched(CheapestWork(), TWO_PAIRS)
    for at_s, name in ((0.0, "first"), (1.0, "second")):
        come(watched, at_s, alone(name))
    come(watched, 2.0, alone("high", 1))
    assert iterate(watched, 200.0, "first") == []
    assert stopped(iterate(watched, 200.0, "second")) == ["second"]


@settings(max_examples=25, deadline=None)
@given(
    count=st.sampled_from((1, 2, 4)),
    coming=st.lists(
        st.tuples(
            st.integers(0, 3), st.floats(0, 2 * H), st.sampled_from(("alice", "alice", "bob"))
        ),
        min_size=2,
        max_size=12,
    ),
)
def test_nobody_takes_each_others_place_again_and_again(
    count: int, coming: list[tuple[int, float, str]]
) -> None:
    """A job is stopped at most once for each that came within its head start, and all end."""
    watched = Watched(CheapestWork(), pairs(count))
    watched.cluster._waiting._ageing_s = H
    now_s, came_s = 0.0, dict[str, float]()
    stops: list[tuple[str, str]] = []
    for number, (priority, later_s, owner) in enumerate(coming):
        now_s += later_s
        one = alone(f"job {number}", priority, owner=owner)
        came_s[one.name] = now_s
        come(watched, now_s, one)
        for _ in range(5):
            now_s += 200
            for name in [*watched.on]:
                if name in watched.on:
                    commands = iterate(watched, now_s, name)
                    stops += [(victim, starts(commands)[0]) for victim in stopped(commands)]
    assert len(stops) == len(set(stops))
    for victim, other in stops:
        more = watched.jobs[other].priority - watched.jobs[victim].priority
        share = watched.jobs[other].owner != watched.jobs[victim].owner
        assert more > 0 and came_s[other] < came_s[victim] + H * (more + share)
    ended = []
    while watched.on:
        name = next(iter(watched.on))
        now_s += H
        watched.tell(Ended(now_s, name))
        ended.append(name)
    assert sorted(ended) == sorted(came_s) and not watched.cluster.waiting


def test_eight_jobs_fit_on_four_and_two_nodes() -> None:
    """Five take all rollout nodes, one training node, and may be no more; three wait."""
    pools = (replace(H20, nodes=4), replace(H800, nodes=2))
    watched = Watched(CheapestWork(), pools)
    watched.cluster.state.max_group = 5
    for n in range(8):
        come(watched, 0.0, job(f"job {n}", 240 + 15 * n, 50 + 4 * (7 - n), cold_start_s=60.0))
    assert len(watched.cluster.waiting) == 3 and len(watched.open) == 5
    restarts = 0
    for n in range(5):
        started = starts(iterate(watched, 300.0 + 20 * n, f"job {n}"))
        restarts += f"job {n}" in started
    assert not watched.cluster.waiting and len(watched.open) == 6
    assert restarts == 2
