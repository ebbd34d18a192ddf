"""The cluster's core where things go wrong: lost jobs, cancelled ones, nodes that are drained."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.cluster.decide.cheapest_work import CheapestWork
from rollpacker.cluster.decide.cluster_turns import LOSSES_S, MAX_LOSSES
from rollpacker.cluster.decide.events import (
    Asked,
    Cancelled,
    Close,
    Command,
    Committed,
    Drained,
    Ended,
    Event,
    GiveUp,
    Grant,
    Grown,
    Left,
    Lost,
    Restored,
    Start,
    StayedAway,
    Stop,
    Submitted,
    Withdrew,
)
from rollpacker.cluster.decide.job import Phase
from rollpacker.cluster.decide.nodes import Node, Pool
from rollpacker.cluster.decide.placement import Policy
from rollpacker.cluster.decide.turns import ORDERS, Order, Turns
from tests.core.test_cluster import POLICIES, POOLS, Watched, drawn, started
from tests.core.test_coexecution import job

ROLLOUT = [Node("cheap", number) for number in range(POOLS[0].nodes)]
TRAIN = [Node("fast", number) for number in range(POOLS[1].nodes)]


class Unkind(Watched):
    """Also obeys what is said about losses. Who was drained may stay until the next commit, and
    nobody comes."""

    def __init__(self, policy: Policy, pools: tuple[Pool, ...] = POOLS) -> None:
        super().__init__(policy, pools)
        self.drained: set[Node] = set()
        self.cancelled: set[str] = set()

    def tell(self, event: Event) -> list[Command]:
        if isinstance(event, Lost | Withdrew):
            self._let_go(event.job)
        if isinstance(event, Lost) and event.job in self.cancelled:
            del self.on[event.job]  # it need not be started again
        if isinstance(event, Cancelled):
            self.cancelled.add(event.job)
        if isinstance(event, Drained):
            self.drained.add(event.node)
        if isinstance(event, Restored):
            self.drained.discard(event.node)
        return super().tell(event)

    def _obey(self, command: Command) -> None:
        if (isinstance(command, Stop) and not command.of_cancelled) or isinstance(command, GiveUp):
            self._let_go(command.job)
            del self.on[command.job]
            return
        if isinstance(command, Start):
            before = self.on.get(command.job)
            same = before is not None and self._nodes(before) == self._nodes(command)
            if not same:
                assert self.drained.isdisjoint(self._nodes(command))
        super()._obey(command)


def events_of(rng: random.Random, watched: Unkind, now_s: float) -> Event:
    """Something that may happen to a job, a node or a pool now."""
    name = rng.choice(sorted(watched.on))
    kind = rng.random()
    if kind < 0.4:
        return Lost(now_s, name)
    if kind < 0.5:
        return Cancelled(now_s, name)
    if kind > 0.97:
        pool = rng.choice(watched.cluster.pools)
        return Grown(now_s, pool.name, pool.nodes + 1)
    node = rng.choice([*ROLLOUT, *TRAIN])
    has_host = rng.random() < 0.5
    return Restored(now_s, node) if kind > 0.72 else Drained(now_s, node, has_host)


@pytest.mark.parametrize("policy", POLICIES, ids=["published", "shipped", "round robin"])
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_whatever_is_lost_nothing_is_given_twice_and_nobody_starves(
    policy: Policy, seed: int
) -> None:
    rng = random.Random(seed)
    watched = Unkind(policy)
    asks: dict[str, Phase] = {}
    """Who waits or holds, and for what."""
    done: dict[str, int] = {}
    now_s, submitted, told = 0.0, 0, 0
    while submitted < 12 or watched.on or watched.cluster.waiting:
        now_s += rng.expovariate(0.1)
        told += 1
        assert told < 20_000, "somebody starves"
        if submitted < 12 and (not watched.on or rng.random() < 0.1):
            one = drawn(f"job {submitted}", rng)
            submitted += 1
            watched.jobs[one.name] = one
            watched.tell(Submitted(now_s, one))
            continue
        if not watched.on:  # whose nodes are drained
            for node in sorted(watched.drained):
                watched.tell(Restored(now_s, node))
            continue
        if rng.random() < 0.05:
            event = events_of(rng, watched, now_s)
            if isinstance(event, Lost):
                asks.pop(event.job, None)
            watched.tell(event)
            continue
        for name in watched.cluster.overdue(now_s):
            watched.tell(StayedAway(now_s, name))
        name = rng.choice(sorted(watched.on))
        _happens_to(name, rng, watched, asks, done, now_s)
    for node in sorted(watched.drained):
        watched.tell(Restored(now_s, node))
    assert not watched.open and not watched.held and not watched.tokens
    assert watched.cluster.num_running == 0
    for pool in watched.cluster.pools:
        assert watched.cluster.state.nodes.num_free(pool.name) == pool.nodes


def _happens_to(
    name: str,
    rng: random.Random,
    watched: Unkind,
    asks: dict[str, Phase],
    done: dict[str, int],
    now_s: float,
) -> None:
    """A job asks for any pool, in any order; and it commits after a training, or ends."""
    if name not in asks:
        asks[name] = rng.choice(("rollout", "rollout", "train"))
        watched.tell(Asked(now_s, name, asks[name]))
    elif name in watched.tokens:
        phase = asks.pop(name)
        watched.tell(Left(now_s, name, phase, watched.tokens[name].token))
        if phase == "train":
            done[name] = done.get(name, 0) + 1
            is_over = done[name] >= 12 or name in watched.cancelled
            watched.tell(Ended(now_s, name) if is_over else Committed(now_s, name, 100.0))
    elif rng.random() < 0.05:
        watched.tell(Withdrew(now_s, name, asks.pop(name)))


def shared(count: int, **settings: object) -> tuple[Unkind, Sequence[str]]:
    """So many jobs on one pair of nodes."""
    pools = (replace(POOLS[0], nodes=1), replace(POOLS[1], nodes=1))
    watched = Unkind(CheapestWork(), pools)
    names = ["a", "b", "c"][:count]
    for name in names:
        watched.jobs[name] = job(name, 100, 30, 3.0, **settings)
        watched.tell(Submitted(0.0, watched.jobs[name]))
    assert [*watched.on] == names
    return watched, names


def test_a_lost_job_gives_up_its_nodes_at_once_and_starts_on_them_again() -> None:
    watched, _ = shared(2)
    (grant,) = watched.tell(Asked(1.0, "a", "rollout"))
    assert watched.tell(Asked(2.0, "b", "rollout")) == []
    before = watched.on["a"]
    commands = watched.tell(Lost(3.0, "a"))
    assert [one.job for one in commands if isinstance(one, Grant)] == ["b"]
    assert started(commands) == before
    assert isinstance(grant, Grant)
    assert watched.tell(Left(4.0, "a", "rollout", grant.token)) == [], "of a grant that is over"


@pytest.mark.parametrize(
    ("apart_s", "commits", "gives_up"),
    [(10.0, False, True), (10.0, True, False), (LOSSES_S, False, False)],
    ids=["again and again", "with commits between", "seldom"],
)
def test_a_job_that_is_lost_too_often_is_given_up(
    apart_s: float, commits: bool, gives_up: bool
) -> None:
    watched, _ = shared(1)
    for number in range(MAX_LOSSES + 1):
        commands = watched.tell(Lost(number * apart_s, "a"))
        if commits:
            watched.tell(Committed(number * apart_s + 1, "a", 100.0))
    assert (GiveUp("a") in commands) == gives_up
    assert any(isinstance(one, Close) for one in commands) == gives_up
    assert bool(watched.cluster.num_running) != gives_up


def test_a_cancelled_job_stops_and_frees_its_nodes_by_its_end() -> None:
    watched, _ = shared(1, rollout_memory_gib=1000.0)
    watched.jobs["d"] = job("d", 100, 30, rollout_memory_gib=1000.0)
    watched.tell(Submitted(1.0, watched.jobs["d"]))
    assert watched.cluster.waiting == ["d"]
    assert watched.tell(Cancelled(2.0, "a")) == [Stop("a", "it was cancelled", of_cancelled=True)]
    assert watched.tell(Cancelled(2.5, "a")) == []
    assert watched.cluster.waiting == ["d"], "its processes are there still"
    assert started(watched.tell(Ended(3.0, "a"))).job == "d"


def test_a_job_that_waits_is_cancelled_at_once() -> None:
    watched, _ = shared(1, rollout_memory_gib=1000.0)
    watched.jobs["d"] = job("d", 100, 30, rollout_memory_gib=1000.0)
    watched.tell(Submitted(1.0, watched.jobs["d"]))
    assert watched.tell(Cancelled(2.0, "d")) == []
    assert not watched.cluster.waiting
    assert not any(isinstance(one, Start) for one in watched.tell(Ended(3.0, "a")))


@pytest.mark.parametrize("node", [Node("cheap", 0), Node("fast", 0)], ids=["rollout", "train"])
def test_jobs_leave_a_drained_node_at_their_next_commit(node: Node) -> None:
    pools = (replace(POOLS[0], nodes=2), replace(POOLS[1], nodes=2))
    watched = Unkind(CheapestWork(), pools)
    watched.jobs["a"] = job("a", 100, 30, 3.0)
    watched.tell(Submitted(0.0, watched.jobs["a"]))
    assert node in (*watched.on["a"].rollout_nodes, *watched.on["a"].train_nodes)
    assert watched.tell(Drained(1.0, node)) == []
    moved = started(watched.tell(Committed(2.0, "a", 130.0)))
    assert node not in (*moved.rollout_nodes, *moved.train_nodes)
    assert node not in watched.open


def test_a_job_that_is_to_start_where_no_host_is_goes_elsewhere_at_once() -> None:
    pools = (replace(POOLS[0], nodes=4), replace(POOLS[1], nodes=2))
    watched = Unkind(CheapestWork(), pools)
    for name in "ab":
        watched.jobs[name] = job(name, 100, 30, 3.0)
        watched.tell(Submitted(0.0, watched.jobs[name]))
    (node,) = watched.on["a"].train_nodes
    assert watched.on["b"].train_nodes == (node,)
    watched.tell(Asked(1.0, "b", "rollout"))
    watched.tell(Lost(2.0, "a"))
    moved = started(watched.tell(Drained(3.0, node, has_host=False)))
    assert moved.job == "a" and node not in moved.train_nodes
    assert watched.on["b"].train_nodes == (node,), "it runs, until it is lost"
    assert started(watched.tell(Lost(4.0, "b"))).train_nodes == moved.train_nodes


def test_who_holds_nodes_is_not_moved() -> None:
    watched, _ = shared(1)
    watched.tell(Drained(1.0, Node("fast", 0)))
    (grant,) = watched.tell(Asked(2.0, "a", "rollout"))
    assert isinstance(grant, Grant)
    assert watched.tell(Committed(3.0, "a", 130.0)) == [], "an evaluation is under way"
    watched.tell(Left(4.0, "a", "rollout", grant.token))
    assert any(isinstance(one, Stop) for one in watched.tell(Committed(5.0, "a", 130.0)))


def test_jobs_wait_for_a_pool_that_has_lost_its_last_node() -> None:
    watched, _ = shared(2)
    watched.tell(Drained(1.0, Node("fast", 0)))
    (stop,) = (one for one in watched.tell(Committed(2.0, "a", 130.0)) if isinstance(one, Stop))
    assert (stop.job, stop.of_cancelled) == ("a", False)
    assert watched.cluster.waiting == ["a"]
    watched.tell(Lost(3.0, "b"))
    assert watched.cluster.waiting == ["a", "b"] and not watched.open
    commands = watched.tell(Restored(4.0, Node("fast", 0)))
    assert [one.job for one in commands if isinstance(one, Start)] == ["a", "b"]


def test_a_node_that_is_not_there_cannot_be_drained() -> None:
    watched, _ = shared(1)
    with pytest.raises(ValueError, match=r"no node cheap/7; there are cheap/0 to 0, fast/0 to 0"):
        watched.cluster.handle(Drained(1.0, Node("cheap", 7)))


def test_jobs_that_wait_start_on_nodes_that_a_pool_is_given() -> None:
    watched = Unkind(CheapestWork(), (replace(POOLS[0], nodes=1), replace(POOLS[1], nodes=1)))
    for name in "ab":
        watched.jobs[name] = job(name, 100.0, 30.0, slo=1.0)
        watched.tell(Submitted(0.0, watched.jobs[name]))
    assert watched.cluster.waiting == ["b"]
    assert watched.tell(Grown(1.0, "cheap", 2)) == [], "it needs one of each"
    (start,) = (n for n in watched.tell(Grown(2.0, "fast", 3)) if isinstance(n, Start))
    assert (start.rollout_nodes, start.train_nodes) == ((Node("cheap", 1),), (Node("fast", 1),))
    assert [pool.nodes for pool in watched.cluster.pools] == [2, 3]
    watched.tell(Drained(3.0, Node("fast", 2)))
    for event, told in (
        (Grown(4.0, "fast", 2), r"pool fast has 3 nodes by now, .* drain fast/2 takes a node out"),
        (Grown(4.0, "slow", 2), "there is no pool slow; there are cheap, fast"),
    ):
        with pytest.raises(ValueError, match=told):
            watched.cluster.handle(event)


# -- what is asked for besides turns -----------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_refills_and_evaluations_stall_nobody(order: Order, seed: int) -> None:
    """Jobs that ask for a pool as often as they like within an iteration get on, all of them."""
    rng = random.Random(seed)
    turns = Turns(order)
    nodes = {name: rng.sample(range(3), rng.randint(1, 3)) for name in "abcd"}
    for name, own in nodes.items():
        turns.join(name, own, 2.0)
    plans = {name: _plan(rng) for name in nodes}
    waiting: dict[str, int] = {}
    holding: dict[str, Phase] = {}
    for now in range(100_000):
        if not any(plans.values()):
            break
        idle = [n for n in plans if plans[n] and n not in waiting and n not in holding]
        granted: list[tuple[str, Phase]] = []
        if idle and (not holding or rng.random() < 0.5):
            name = rng.choice(idle)
            waiting[name] = now
            granted = turns.ask(name, plans[name][0], now)
        elif holding:
            name = rng.choice(sorted(holding))
            phase = holding.pop(name)
            plans[name].pop(0)
            granted = turns.leave(name, phase, now)
            if not plans[name]:
                granted += turns.remove(name, now)
        else:
            raise AssertionError(f"nobody gets on: {waiting}")
        for name, phase in granted:
            assert phase == plans[name][0]
            del waiting[name]
            holding[name] = phase
    assert not any(plans.values())


def _plan(rng: random.Random) -> list[Phase]:
    """Iterations with refills, evaluations, trainings to begin with."""
    plan: list[Phase] = ["train"] * rng.randint(0, 1)
    for _ in range(6):
        plan += ["rollout"] * rng.choice((1, 1, 2, 4))
        plan += ["train"] * rng.choice((1, 1, 1, 2))
    return plan


def test_a_refill_is_first_come_first_served_in_round_robin() -> None:
    turns = Turns("round_robin")
    for name in "ab":
        turns.join(name, [0], 2.0)
    assert turns.ask("a", "rollout", 0.0) == [("a", "rollout")]
    assert turns.ask("b", "rollout", 1.0) == []
    assert turns.leave("a", "rollout", 2.0) == [("b", "rollout")]
    assert turns.ask("a", "rollout", 3.0) == [], "a refill, while b rolls out"
    assert turns.leave("b", "rollout", 4.0) == [("a", "rollout")]
    assert turns.ask("b", "train", 5.0) == [], "it is a's turn"
    assert turns.leave("a", "rollout", 6.0) == []
    assert turns.ask("a", "train", 7.0) == [("a", "train")]
    assert turns.leave("a", "train", 8.0) == [("b", "train")]


def test_who_waits_for_nothing_any_more_lets_others_pass() -> None:
    turns = Turns("first_come")
    turns.join("wide", [0, 1], 2.0)
    for number, name in enumerate("ab"):
        turns.join(name, [number], 2.0)
    assert turns.ask("a", "rollout", 0.0) == [("a", "rollout")]
    assert turns.ask("wide", "rollout", 1.0) == []
    assert turns.ask("b", "rollout", 2.0) == [], "nobody overtakes on its nodes"
    assert turns.withdraw("wide", 3.0) == [("b", "rollout")]
    assert turns.withdraw("wide", 4.0) == []
