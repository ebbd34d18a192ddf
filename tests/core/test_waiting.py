"""Jobs that wait for nodes: head starts, ageing, quotas."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.cluster.decide.cheapest_work import CheapestWork
from rollpacker.cluster.decide.cluster import Cluster
from rollpacker.cluster.decide.events import Command, Ended, Start, Submitted
from rollpacker.cluster.decide.job import ClusterJob
from rollpacker.cluster.decide.waiting import Devices, Waiting, devices
from tests.core.test_coexecution import H20, H800, job

PAIR = (replace(H20, nodes=1), replace(H800, nodes=1))
POOLS = (replace(H20, nodes=4), replace(H800, nodes=4))
H = 3600.0


def names(jobs: list[ClusterJob]) -> list[str]:
    return [one.name for one in jobs]


def owned(name: str, owner: str, size: int = 8, priority: int = 0) -> ClusterJob:
    """A job that shares with nobody."""
    return job(
        name,
        100,
        100,
        1.0,
        owner=owner,
        priority=priority,
        rollout_devices=size,
        train_devices=size,
    )


def test_a_priority_is_a_head_start_of_some_hours() -> None:
    waiting = Waiting(POOLS, ageing_s=4 * H)
    waiting.add(owned("first", "a"), 0.0)
    waiting.add(owned("urgent, soon after", "a", priority=1), 3.9 * H)
    waiting.add(owned("urgent, much later", "a", priority=1), 4.1 * H)
    assert names(waiting.in_order([])) == ["urgent, soon after", "first", "urgent, much later"]
    assert names([*waiting]) == ["first", "urgent, soon after", "urgent, much later"]


def test_who_has_less_of_his_quota_goes_first() -> None:
    quotas: dict[str, Devices] = {"alice": {"rollout": 32, "train": 16}, "bob": {"train": 16}}
    waiting = Waiting(POOLS, quotas, ageing_s=4 * H)
    waiting.add(owned("alice's", "alice"), 0.0)
    waiting.add(owned("bob's", "bob"), 1.9 * H)
    waiting.add(owned("carol's", "carol"), 1.95 * H)
    assert names(waiting.in_order([])) == ["alice's", "bob's", "carol's"]
    runs = owned("runs", "alice")  # half of what she may have for training: two hours
    assert names(waiting.in_order([runs])) == ["bob's", "carol's", "alice's"]
    bobs = owned("also runs", "bob")
    assert names(waiting.in_order([runs, bobs])) == ["carol's", "alice's", "bob's"]


def test_a_job_beyond_its_quota_keeps_nobody_up() -> None:
    waiting = Waiting(POOLS, {"alice": {"rollout": 8}})
    waiting.add(owned("alice's", "alice", priority=9), 0.0)
    waiting.add(owned("bob's", "bob"), 1.0)
    assert names(waiting.in_order([owned("runs", "alice")]))[0] == "alice's"
    found = waiting.next([owned("runs", "alice")])
    assert found is not None and found.name == "bob's"
    found = waiting.next([])
    assert found is not None and found.name == "alice's"
    waiting.remove("bob's")
    assert waiting.next([owned("runs", "alice")]) is None


def test_a_job_that_its_quota_never_lets_start_is_refused() -> None:
    cluster = Cluster(POOLS, CheapestWork(), quotas={"alice": {"rollout": 8}})
    with pytest.raises(ValueError) as raised:
        cluster.handle(Submitted(0.0, owned("big", "alice", size=16)))
    assert str(raised.value) == (
        "job big needs 16 rollout devices, and alice may have 8: lower its rollout_devices "
        "(of a run: rollout.engines) or raise quotas.alice.rollout"
    )
    assert not cluster.waiting


def test_nothing_overtakes_a_job_that_fits_nowhere() -> None:
    """The small one would fit on the nodes that are free, and the big one waits for them."""
    cluster = Cluster(POOLS, CheapestWork())
    for at_s, one in enumerate((owned("runs", "a", 16), owned("big", "b", 32), owned("s", "c"))):
        cluster.handle(Submitted(at_s, one))
    assert cluster.waiting == ["big", "s"]
    assert started(cluster.handle(Ended(9.0, "runs"))) == ["big"]
    assert started(cluster.handle(Ended(10.0, "big"))) == ["s"]


def started(commands: list[Command]) -> list[str]:
    return [one.job for one in commands if isinstance(one, Start)]


drawn = st.lists(
    st.tuples(
        st.sampled_from(("alice", "bob", "carol", "")),
        st.sampled_from((8, 16)),
        st.integers(-1, 3),
        st.floats(0, 3 * H),
        st.booleans(),
    ),
    max_size=25,
)


@settings(max_examples=40, deadline=None)
@given(coming=drawn, most=st.sampled_from((16, 24)))
def test_quotas_are_never_exceeded_and_all_jobs_run(
    coming: list[tuple[str, int, int, float, bool]], most: int
) -> None:
    quotas: dict[str, Devices] = {"alice": {"rollout": most, "train": 16}, "bob": {"train": most}}
    cluster = Cluster(POOLS, CheapestWork(), quotas=quotas, ageing_s=H)
    there: dict[str, ClusterJob] = {}
    run: list[str] = []
    done: list[str] = []
    now_s = 0.0

    def tell(event: Submitted | Ended) -> None:
        run.extend(started(cluster.handle(event)))
        for owner, quota in quotas.items():
            for phase, limit in quota.items():
                own = [there[one] for one in run if one not in done and there[one].owner == owner]
                assert sum(devices(one, phase) for one in own) <= limit

    for number, (owner, size, priority, later_s, ends) in enumerate(coming):
        now_s += later_s
        one = there[f"job {number}"] = owned(f"job {number}", owner, size, priority)
        tell(Submitted(now_s, one))
        running = [name for name in run if name not in done]
        if ends and running:
            done.append(running[0])
            tell(Ended(now_s, running[0]))
    while len(done) < len(run):
        name = next(name for name in run if name not in done)
        done.append(name)
        now_s += H
        tell(Ended(now_s, name))
    assert sorted(run) == sorted(there) and not cluster.waiting


@settings(max_examples=100, deadline=None)
@given(
    coming=st.lists(st.tuples(st.integers(0, 3), st.sampled_from("ab"), st.floats(0, H))),
    busy=st.lists(st.sampled_from("ab"), max_size=6),
)
def test_a_job_is_overtaken_only_within_its_bound(
    coming: list[tuple[int, str, float]], busy: list[str]
) -> None:
    waiting = Waiting(PAIR, {"a": {"rollout": 32}}, ageing_s=H)
    came_s: dict[str, float] = {}
    now_s = 0.0
    for number, (priority, owner, later_s) in enumerate(coming):
        now_s += later_s
        waiting.add(owned(f"job {number}", owner, priority=priority), now_s)
        came_s[f"job {number}"] = now_s
    order = waiting.in_order([owned(f"runs {n}", one) for n, one in enumerate(busy)])
    assert sorted(names(order)) == sorted(came_s)
    for place, late in enumerate(order):
        for early in order[:place]:
            head_start_s = H * (max(early.priority - late.priority, -1) + 1)
            assert came_s[early.name] <= came_s[late.name] + head_start_s


@settings(max_examples=15, deadline=None)
@given(ends=st.lists(st.integers(0, 3), min_size=30, max_size=30))
def test_nobody_starves_while_more_urgent_jobs_keep_coming(ends: list[int]) -> None:
    """One node of each kind, one job at a time, and an urgent one comes as often as one ends."""
    cluster = Cluster(PAIR, CheapestWork(), ageing_s=4 * H)
    runs = started(cluster.handle(Submitted(0.0, owned("urgent", "b", priority=2))))
    cluster.handle(Submitted(1.0, owned("patient", "a")))
    now_s = 1.0
    for number, hours in enumerate(ends):
        now_s += (1 + hours) * H
        cluster.handle(Submitted(now_s, owned(f"urgent {number}", "b", priority=2)))
        runs = started(cluster.handle(Ended(now_s, runs[0])))
        if runs == ["patient"]:
            break
    assert runs == ["patient"]
    assert now_s <= 1.0 + (3 * 4 + 4) * H, "who comes 12 hours later does not overtake it"
