"""Jobs that hang between two phases: in round robin it is their turn, and nobody waits for ever."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollpacker.cluster.decide.cheapest_work import CheapestWork
from rollpacker.cluster.decide.cluster_turns import PATIENCE, PATIENCE_S
from rollpacker.cluster.decide.events import Asked, Command, Grant, Left, StayedAway, Submitted
from rollpacker.cluster.decide.job import ClusterJob, Phase, RoundTimes
from rollpacker.cluster.decide.turns import ORDERS, Order, Turns
from tests.core.test_cluster import POOLS, Watched


def granted(commands: list[Command]) -> list[tuple[str, Phase]]:
    return [(one.job, one.phase) for one in commands if isinstance(one, Grant)]


def away(between_s: float = 0.0) -> Watched:
    """Two jobs on one pair of nodes. Both have rolled out; the first is away since second 10, and
    the second wants to train."""
    pools = (replace(POOLS[0], nodes=1), replace(POOLS[1], nodes=1))
    watched = Watched(CheapestWork(orders=("round_robin",)), pools)
    rounds = (RoundTimes(rollout_s=(100.0,), train_s=(30.0,), between_s=between_s),)
    for name in "ab":
        watched.jobs[name] = ClusterJob(name=name, rounds=rounds, steps=100, slo=3.0)
        watched.tell(Submitted(0.0, watched.jobs[name]))
    phases: tuple[Phase, ...] = ("rollout", "train", "rollout")
    for number, phase in enumerate(phases):  # it came first: b begins with a's second turn
        watched.tell(Asked(number, "a", phase))
        if number == 0:
            watched.tell(Asked(1.0, "b", "rollout"))
        watched.tell(Left(number + 8.0, "a", phase, watched.tokens["a"].token))
    assert watched.cluster.overdue(1e6) == [], "the rollout pool is b's, and nobody waits"
    watched.tell(Left(11.0, "b", "rollout", watched.tokens["b"].token))
    return watched


@pytest.mark.parametrize(("between_s", "patience_s"), [(0.0, PATIENCE_S), (40.0, PATIENCE * 40.0)])
def test_nobody_waits_for_a_job_that_is_away_for_longer_than_it_said(
    between_s: float, patience_s: float
) -> None:
    watched = away(between_s)
    assert granted(watched.tell(Asked(12.0, "b", "train"))) == [], "it is a's turn"
    assert watched.cluster.overdue(10.0 + patience_s) == []
    now_s = 11.0 + patience_s
    assert watched.cluster.overdue(now_s) == ["a"]
    assert granted(watched.tell(StayedAway(now_s, "a"))) == [("b", "train")]
    # b goes on alone for as long as it takes.
    for _ in range(2):
        now_s += 1.0
        for phase in ("train", "rollout"):
            watched.tell(Left(now_s, "b", phase, watched.tokens["b"].token))
            wanted: Phase = "rollout" if phase == "train" else "train"
            assert granted(watched.tell(Asked(now_s, "b", wanted))) == [("b", wanted)]
    # It comes back, and has its turns again.
    assert granted(watched.tell(Asked(now_s, "a", "train"))) == []
    token = watched.tokens["b"].token
    assert granted(watched.tell(Left(now_s, "b", "train", token))) == [("a", "train")]
    watched.tell(Left(now_s, "a", "train", watched.tokens["a"].token))
    assert granted(watched.tell(Asked(now_s, "a", "rollout"))) == [], "b's is the next turn"
    assert granted(watched.tell(Asked(now_s, "b", "rollout"))) == [("b", "rollout")]
    token = watched.tokens["b"].token
    assert granted(watched.tell(Left(now_s, "b", "rollout", token))) == [("a", "rollout")]
    assert granted(watched.tell(Asked(now_s, "b", "train"))) == [("b", "train")]


@pytest.mark.parametrize("order", [one for one in ORDERS if one != "round_robin"])
def test_in_other_orders_nobody_is_waited_for(order: Order) -> None:
    turns = Turns(order)
    for name in "ab":
        turns.join(name, [0], 3.0)
        assert turns.ask(name, "rollout", 0.0) == [(name, "rollout")]
        assert turns.leave(name, "rollout", 1.0) == []
    assert turns.ask("b", "train", 2.0) == [("b", "train")]
    assert turns.ask("a", "train", 3.0) == [] and turns.awaited(1e6) == {}


def test_a_job_that_comes_just_then_keeps_its_turn() -> None:
    """It was found overdue, and its letter was read before that was told."""
    watched = away()
    watched.tell(Asked(12.0, "b", "train"))
    assert granted(watched.tell(Asked(99.0, "a", "train"))) == [("a", "train")]
    assert watched.tell(StayedAway(99.0, "a")) == []
    assert watched.tell(StayedAway(99.0, "nobody")) == []
    token = watched.tokens["a"].token
    assert granted(watched.tell(Left(100.0, "a", "train", token))) == [("b", "train")]
