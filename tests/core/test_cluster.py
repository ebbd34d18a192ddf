"""The cluster's core: jobs come and go, and nothing is given twice or kept."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from rollpacker.cluster.decide.cheapest_work import CheapestWork
from rollpacker.cluster.decide.cluster import Cluster
from rollpacker.cluster.decide.events import (
    Asked,
    Close,
    Command,
    Committed,
    Ended,
    Event,
    Grant,
    Left,
    Open,
    Start,
    Stop,
    Submitted,
)
from rollpacker.cluster.decide.forecast import Outlook, Rest, foresee
from rollpacker.cluster.decide.job import ClusterJob, Phase, RoundTimes
from rollpacker.cluster.decide.nodes import Node, Pool
from rollpacker.cluster.decide.placement import Choice, Policy, State
from rollpacker.cluster.decide.turns import ORDERS
from rollpacker.cluster.sim.policies import AsPublished
from tests.core.test_coexecution import H20, H800, job

POOLS = (replace(H20, nodes=6), replace(H800, nodes=3))
PHASES: tuple[Phase, ...] = ("rollout", "train")
LIMITS = {pool.name: pool.host_memory_gib for pool in POOLS}


class Watched:
    """A cluster whose commands are obeyed and checked."""

    def __init__(self, policy: Policy, pools: tuple[Pool, ...] = POOLS) -> None:
        self.cluster = Cluster(pools, policy, max_group=4)
        self.jobs: dict[str, ClusterJob] = {}
        self.on: dict[str, Start] = {}
        self.groups: dict[Node, int] = {}
        self.open: set[Node] = set()
        self.held: dict[Node, str] = {}
        self.tokens: dict[str, Grant] = {}
        self.last_token = 0

    def tell(self, event: Event) -> list[Command]:
        if isinstance(event, Ended):
            self._let_go(event.job)
            del self.on[event.job]
        if isinstance(event, Left) and self.tokens.get(event.job, event).token == event.token:
            self._let_go(event.job)
        commands = self.cluster.handle(event)
        for command in commands:
            self._obey(command)
        return commands

    def _let_go(self, name: str) -> None:
        self.tokens.pop(name, None)
        self.held = {node: one for node, one in self.held.items() if one != name}

    def _obey(self, command: Command) -> None:
        match command:
            case Open():
                assert not self.open & {*command.nodes}
                self.open |= {*command.nodes}
            case Close():
                assert self.open >= {*command.nodes}
                self.open -= {*command.nodes}
                assert not any(node in self.open for node in command.nodes)
                for node in command.nodes:
                    self.groups.pop(node, None)
            case Start():
                self.on[command.job] = command
                nodes = (*command.rollout_nodes, *command.train_nodes)
                assert self.open >= {*nodes}
                for node in nodes:
                    assert self.groups.setdefault(node, command.group) == command.group
                    there = [n for n, one in self.on.items() if node in self._nodes(one)]
                    assert sum(self._gib(n, node) for n in there) <= LIMITS[node.pool]
                    assert len(there) <= self.cluster.state.max_group
            case Stop() if not command.of_cancelled:
                self._let_go(command.job)
                self.on.pop(command.job, None)
            case Grant():
                assert command.token > self.last_token
                self.last_token = command.token
                self.tokens[command.job] = command
                start = self.on[command.job]
                wanted = start.rollout_nodes if command.phase == "rollout" else start.train_nodes
                for node in wanted:
                    assert node not in self.held, (node, self.held[node], command)
                    self.held[node] = command.job

    def _gib(self, name: str, node: Node) -> float:
        one = self.jobs[name]
        return one.rollout_memory_gib if node.pool == "cheap" else one.train_memory_gib

    @staticmethod
    def _nodes(start: Start) -> tuple[Node, ...]:
        return (*start.rollout_nodes, *start.train_nodes)


POLICIES: list[Policy] = [
    AsPublished(),
    CheapestWork(confidence=0.9),
    CheapestWork(confidence=0.9, orders=("round_robin",)),
]


@pytest.mark.parametrize("policy", POLICIES, ids=["published", "shipped", "round robin"])
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_nothing_is_given_twice_and_nothing_is_left(policy: Policy, seed: int) -> None:
    rng = random.Random(seed)
    watched = Watched(policy)
    phase: dict[str, tuple[str, Phase]] = {}
    now_s, submitted = 0.0, 0
    while submitted < 10 or watched.on:
        now_s += rng.expovariate(0.1)
        coming = submitted < 10 and (not watched.on or rng.random() < 0.1)
        if coming:
            one = drawn(f"job {submitted}", rng)
            submitted += 1
            watched.jobs[one.name] = one
            watched.tell(Submitted(now_s, one))
            continue
        name = rng.choice(sorted(watched.on))
        if rng.random() < 0.02:
            phase.pop(name, None)
            watched.tell(Ended(now_s, name))
            continue
        what, which = phase.get(name, ("idle", "rollout"))
        if what == "idle":
            phase[name] = ("asked", which)
            watched.tell(Asked(now_s, name, which))
        elif name in watched.tokens:
            grant = watched.tokens[name]
            assert grant.phase == which
            assert watched.tell(Left(now_s, name, which, grant.token + 10**6)) == []
            watched.tell(Left(now_s, name, which, grant.token))
            if which == "train":
                watched.tell(Committed(now_s, name, 100.0))
            phase[name] = ("idle", "train" if which == "rollout" else "rollout")
    assert not watched.open and not watched.held
    assert watched.cluster.num_running == 0 and not watched.cluster.waiting
    for pool in POOLS:
        assert watched.cluster.state.nodes.num_free(pool.name) == pool.nodes


def drawn(name: str, rng: random.Random) -> ClusterJob:
    length = rng.choice((1.0, 2.0, 5.0))
    spread = sorted(rng.uniform(0.8, 1.3) for _ in range(4))
    rounds = RoundTimes(
        rollout_s=tuple(60 * length * one for one in spread),
        train_s=tuple(50 * length * one for one in spread),
    )
    return job(
        name,
        1,
        1,
        rng.uniform(1, 2.5),
        rounds=(rounds,),
        rollout_devices=rng.choice((8, 8, 16)),
        train_devices=rng.choice((8, 8, 16)),
        rollout_memory_gib=rng.choice((200.0, 500.0)),
        train_memory_gib=rng.choice((200.0, 500.0)),
        priority=rng.choice((0, 1)),
    )


def started(commands: list[Command]) -> Start:
    (start,) = (one for one in commands if isinstance(one, Start))
    return start


def test_equal_jobs_share_a_pair_though_it_is_over_saturated() -> None:
    """Two of 134 + 113 s: 8 % more than the nodes have time for, and cheaper than two pairs."""
    shipped, published = Watched(CheapestWork()), Watched(AsPublished())
    for watched in (shipped, published):
        for name in "ab":
            one = watched.jobs[name] = job(name, 134, 113, 1.2)
            watched.tell(Submitted(0.0, one))
    assert shipped.on["a"].rollout_nodes == shipped.on["b"].rollout_nodes
    assert shipped.on["a"].train_nodes == shipped.on["b"].train_nodes
    assert published.on["a"].train_nodes == published.on["b"].train_nodes
    assert published.on["a"].rollout_nodes != published.on["b"].rollout_nodes, "more nodes instead"


@pytest.mark.parametrize("policy", [AsPublished(), CheapestWork()], ids=["published", "shipped"])
def test_a_job_that_would_be_slowed_down_too_much_is_alone(policy: Policy) -> None:
    watched = Watched(policy)
    for name, rollout_s in (("long", 600), ("short", 50)):
        one = watched.jobs[name] = job(name, rollout_s, rollout_s, 1.02)
        watched.tell(Submitted(0.0, one))
    assert watched.on["long"].group != watched.on["short"].group


@pytest.mark.parametrize("policy", [AsPublished(), CheapestWork()], ids=["published", "shipped"])
def test_host_memory_bounds_a_group(policy: Policy) -> None:
    watched = Watched(policy)
    for name in "abc":
        one = watched.jobs[name] = job(
            name, 100, 20, 2.0, rollout_memory_gib=10.0, train_memory_gib=700.0
        )
        watched.tell(Submitted(0.0, one))
    assert [watched.on[name].group for name in "abc"] == [0, 0, 1]


def test_jobs_wait_for_nodes_by_priority() -> None:
    pools = (replace(H20, nodes=1), replace(H800, nodes=1))
    watched = Watched(CheapestWork(), pools)
    for name, priority in (("runs", 0), ("low", 0), ("high", 1)):
        one = watched.jobs[name] = job(name, 150, 50, 1.0, priority=priority)
        watched.tell(Submitted(0.0, one))
    assert watched.cluster.waiting == ["high", "low"]
    assert started(watched.tell(Ended(1.0, "runs"))).job == "high"


@pytest.mark.parametrize(
    ("policy", "before", "does_move"),
    [(CheapestWork(), 0, True), (CheapestWork(moves=False), 0, False), (CheapestWork(), 98, False)],
    ids=["at its first commit", "a policy without moves", "before its last iteration"],
)
def test_a_job_moves_where_that_pays_for_its_restart(
    policy: CheapestWork, before: int, does_move: bool
) -> None:
    """Of three jobs of 100 + 100 s two fill a pair of nodes. When one of them ends, the third takes
    its place, if so much is left of its life."""
    watched = Watched(policy)
    for name in "abc":
        one = watched.jobs[name] = job(name, 100, 100, 1.1, cold_start_s=150.0)
        watched.tell(Submitted(0.0, one))
    assert [watched.on[name].group for name in "abc"] == [0, 0, 1]
    now_s = 1.0

    def iterate() -> list[Command]:
        nonlocal now_s
        for phase in PHASES:
            (grant,) = watched.tell(Asked(now_s, "c", phase))
            assert isinstance(grant, Grant)
            now_s += 100
            watched.tell(Left(now_s, "c", phase, grant.token))
        return watched.tell(Committed(now_s, "c", 200.0))

    for _ in range(before):
        assert iterate() == []
    watched.tell(Ended(now_s, "a"))
    moved = any(isinstance(one, Start) for one in iterate())
    assert moved == does_move
    assert (watched.on["c"].train_nodes == watched.on["b"].train_nodes) == does_move
    assert len(watched.open) == (2 if does_move else 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Looks(CheapestWork):
    """Counts how often a job was asked whether it should move."""

    looked: list[str] = field(default_factory=list)

    def move(self, state: State, number: int, job: ClusterJob, *, rest: Rest) -> Choice | None:
        self.looked.append(job.name)
        return CheapestWork.move(self, state, number, job, rest=rest)


def test_a_job_looks_around_once_after_each_change_of_the_cluster() -> None:
    policy = Looks()
    watched = Watched(policy)
    for name in "abc":
        one = watched.jobs[name] = job(name, 100, 100, 1.1, cold_start_s=150.0)
        watched.tell(Submitted(0.0, one))
    for number in range(1, 6):
        assert watched.tell(Committed(200.0 * number, "c", 200.0)) == []
    assert policy.looked == ["c"]
    watched.tell(Ended(1000.0, "a"))
    assert any(isinstance(one, Start) for one in watched.tell(Committed(1200.0, "c", 200.0)))
    for number in range(6, 9):  # having moved is a change: it looks once more, and stays
        assert watched.tell(Committed(200.0 * number, "c", 200.0)) == []
    assert policy.looked == ["c"] * 3


def test_what_a_layout_would_bring_is_found_out_once_until_its_group_changes() -> None:
    watched = Watched(CheapestWork())
    first = watched.jobs["a"] = varied("a", 100)
    watched.tell(Submitted(0.0, first))
    state, comes = watched.cluster.state, varied("b", 80)
    standing = state.groups[0]
    (choice, *_) = state.in_group(0, comes)
    outlook = standing.outlook(choice, comes, "first_come")
    found = outlook.confirmed()
    assert found == foresee(choice.layout, "first_come")
    (again, *_) = state.in_group(0, comes)
    assert standing.outlook(again, comes, "first_come") is outlook
    assert standing.outlook(again, comes, "round_robin") is not outlook
    other = varied("b", 300)  # a later job of that name
    (choice, *_) = state.in_group(0, other)
    assert standing.outlook(choice, other, "first_come").confirmed() != found
    standing.changed()
    assert standing.outlook(again, comes, "first_come") is not outlook


def test_an_early_look_changes_nothing_that_is_foreseen() -> None:
    watched = Watched(CheapestWork())
    first = watched.jobs["a"] = varied("a", 100)
    watched.tell(Submitted(0.0, first))
    (choice, *_) = watched.cluster.state.in_group(0, varied("b", 80))
    for order in ORDERS:
        whole = Outlook(choice.layout, order).forecasts()
        for limit in (0.5, 9.0):  # given up after a third, or gone on with
            outlook = Outlook(choice.layout, order)
            assert outlook.is_hopeless([limit] * 2) == (limit < 1)
            assert outlook.forecasts() == whole
            assert outlook.is_hopeless([0.5] * 2)


def varied(name: str, seconds: float) -> ClusterJob:
    """Iterations of three lengths."""
    lengths = (0.8 * seconds, seconds, 1.4 * seconds)
    return structs.replace(
        job(name, 1, 1), rounds=(RoundTimes(rollout_s=lengths, train_s=lengths),)
    )


def test_a_name_is_submitted_once() -> None:
    watched = Watched(CheapestWork())
    watched.jobs["a"] = job("a", 100, 100)
    watched.tell(Submitted(0.0, watched.jobs["a"]))
    with pytest.raises(ValueError, match="job a is here already"):
        watched.tell(Submitted(1.0, watched.jobs["a"]))


@pytest.mark.parametrize(
    ("needs", "told"),
    [
        ({"rollout_devices": 64}, "needs 64 rollout devices, and no rollout pool has more than 48"),
        ({"train_memory_gib": 2000.0}, "no train node has more than 1,500"),
    ],
)
def test_a_job_that_fits_nowhere_is_refused(needs: dict[str, float], told: str) -> None:
    watched = Watched(CheapestWork())
    with pytest.raises(ValueError, match=told):
        watched.tell(Submitted(0.0, job("a", 100, 100, **needs)))
    assert not watched.cluster.waiting
