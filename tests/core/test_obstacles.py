"""What is said of a job that no nodes take, and whether it is true."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from rollpacker.cluster.decide.cheapest_work import CheapestWork
from rollpacker.cluster.decide.cluster import Cluster
from rollpacker.cluster.decide.events import Cancelled, Start, Submitted
from rollpacker.cluster.decide.job import ClusterJob, RoundTimes
from tests.core.test_cluster import POOLS


def job(name: str, slo: float, rollout_s: float = 100.0, **settings: float) -> ClusterJob:
    rounds = (RoundTimes(rollout_s=(rollout_s, 1.2 * rollout_s), train_s=(30.0,)),)
    return ClusterJob(name=name, rounds=rounds, steps=200, slo=slo, **settings)  # type: ignore[arg-type]


def cluster(*jobs: ClusterJob, max_group: int = 5) -> Cluster:
    """Of one node for each phase, with these jobs, of which the last one waits."""
    pools = (replace(POOLS[0], nodes=1), replace(POOLS[1], nodes=1))
    one = Cluster(pools, CheapestWork(), max_group=max_group)
    for number, each in enumerate(jobs):
        one.handle(Submitted(float(number), each))
    assert one.waiting == [jobs[-1].name]
    return one


def test_whose_slo_would_break_is_named() -> None:
    told = cluster(job("a", slo=1.1), job("b", slo=9.0)).awaits("b", 1.0)
    assert re.fullmatch(
        r"no free nodes are enough for it alone, and beside a the slowdown of a would be "
        r"1\.\d\d \(no more than 1\.10 keeps the SLO\)",
        told,
    )


def varied(name: str, slo: float, steps: int, seconds: tuple[float, ...]) -> ClusterJob:
    rounds = (RoundTimes(rollout_s=seconds, train_s=(30.0,)),)
    return ClusterJob(name=name, rounds=rounds, steps=steps, slo=slo)


def test_an_slo_that_only_the_longer_run_believes_in_is_not_said_to_be_enough() -> None:
    """A job of few and varied iterations."""
    num_told = 0
    for steps in range(3, 9):
        long = varied("a", 4.0, 200, (100.0, 150.0, 200.0, 300.0, 400.0))
        one = cluster(long, varied("b", 1.1, steps, (20.0, 30.0, 50.0)))
        found = re.search(r"submitted with --slo (\S+) it could", one.awaits("b", 1.0))
        if found is None:
            continue
        num_told += 1
        one.handle(Cancelled(3.0, "b"))
        again = varied("b", float(found[1]), steps, (20.0, 30.0, 50.0))
        assert [type(command) for command in one.handle(Submitted(4.0, again))] == [Start], steps
    assert num_told


@pytest.mark.parametrize("slo", [1.0, 1.3])
def test_an_slo_that_is_said_to_be_enough_is(slo: float) -> None:
    one = cluster(job("a", slo=4.0), job("b", slo=4.0, rollout_s=60.0), job("c", slo=slo))
    told = one.awaits("c", 2.0)
    assert "its own slowdown would be" in told and "the slowdown of" not in told
    enough = float(re.search(r"submitted with --slo (\S+) it could start there now", told)[1])  # type: ignore[index]
    assert enough > slo
    one.handle(Cancelled(3.0, "c"))
    commands = one.handle(Submitted(4.0, job("c", slo=enough)))
    assert [type(command) for command in commands] == [Start]


@pytest.mark.parametrize(
    ("settings", "max_group", "told"),
    [
        ({}, 1, "of the groups 1 with max_group (1) jobs"),
        ({"rollout_memory_gib": 1000.0}, 5, "of the groups 1 without room in host memory, or"),
    ],
)
def test_what_no_slo_would_change_is_said(
    settings: dict[str, float], max_group: int, told: str
) -> None:
    jobs = (job(name, slo=9.0, **settings) for name in "ab")
    assert told in cluster(*jobs, max_group=max_group).awaits("b", 1.0)


def test_nothing_is_said_of_a_job_that_only_waits_for_its_turn_to_be_looked_at() -> None:
    one = cluster(job("a", slo=1.0), job("b", slo=1.0))
    one.state.unsettle("a", 0)
    assert one.awaits("b", 2.0) == ""


def test_who_asks_changes_nothing_that_is_decided_later() -> None:
    """A replay does not know when somebody asked."""
    one = cluster(job("a", slo=1.1), job("b", slo=1.0))
    (standing,) = one.state.groups.values()
    standing.changed()
    before = replace(standing)
    assert one.awaits("b", 1.0) and standing == before
    standing.summary.rise(job("b", slo=1.0))
    assert standing != before, "this would be seen"


def test_it_is_looked_for_once_until_the_cluster_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    one = cluster(job("a", slo=1.0), job("b", slo=1.0))
    told = one.awaits("b", 1.0)
    monkeypatch.setattr(CheapestWork, "obstacle", lambda *_, **__: "another")
    assert one.awaits("b", 2.0) == told
    one.handle(Submitted(3.0, job("c", slo=1.0)))
    assert one.awaits("b", 4.0) == "another"
