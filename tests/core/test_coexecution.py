"""Groups of jobs on shared nodes: the period, the turns, the forecasts."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from rollpacker.cluster.decide.forecast import GroupTimeline, foresee
from rollpacker.cluster.decide.group import (
    Holds,
    closed_form_holds,
    closed_period_s,
    period_s,
)
from rollpacker.cluster.decide.job import ClusterJob, Phase, RoundTimes
from rollpacker.cluster.decide.layout import Layout, Pin
from rollpacker.cluster.decide.nodes import Pool
from rollpacker.cluster.decide.turns import ORDERS, TRAINING, Order, Turns

H20 = Pool(
    name="cheap",
    phase="rollout",
    nodes=8,
    devices_per_node=8,
    price_per_device_h=1.85,
    host_memory_gib=1500,
)
H800 = Pool(
    name="fast",
    phase="train",
    nodes=8,
    devices_per_node=8,
    price_per_device_h=5.28,
    host_memory_gib=1500,
)


def job(
    name: str, rollout_s: float, train_s: float, slo: float = 2.0, **more: object
) -> ClusterJob:
    rounds = (RoundTimes(rollout_s=(rollout_s,), train_s=(train_s,)),)
    settings = {"steps": 100, "rounds": rounds} | more
    return ClusterJob(name=name, slo=slo, **settings)  # type: ignore[arg-type]


def layout(*jobs: ClusterJob, pins: Sequence[Sequence[int]] = ()) -> Layout:
    return Layout(
        rollout_pool=H20,
        train_pool=H800,
        num_train_nodes=1,
        jobs=jobs,
        pins=tuple(map(Pin, pins)) or tuple(Pin({0}) for _ in jobs),
    )


# -- the period --------------------------------------------------------------------

seconds = st.integers(1, 600).map(float)
outside = st.one_of(st.just(0.0), st.integers(1, 60).map(float))
holds_of = st.builds(Holds, seconds, outside, seconds, outside)
groups = st.lists(
    st.tuples(holds_of, st.frozensets(st.integers(0, 3), min_size=1, max_size=3)),
    min_size=1,
    max_size=5,
).map(lambda jobs: sorted(jobs, key=lambda one: -len(one[1])))


def seen_period_s(holds: Sequence[Holds], pins: Sequence[frozenset[int]], turns: int) -> float:
    """Over many turns: after `lead`, rounds of up to 12 turns repeat."""
    timeline = GroupTimeline([sorted(pin) for pin in pins], lambda one, _: holds[one])
    lead, window = turns, 60  # a multiple of every number of turns up to 6
    timeline.run_until(lead + window + 2)
    return max(
        (times[lead + window] - times[lead]) / window
        for times in (*timeline.begins_s, *timeline.ends_s)
    )


@settings(max_examples=60, deadline=None)
@given(groups)
def test_the_period_is_that_of_the_turns(group: list[tuple[Holds, frozenset[int]]]) -> None:
    holds, pins = [one for one, _ in group], [pin for _, pin in group]
    period = period_s(holds, pins)
    # Whole seconds: two cycles that are not equally long differ by a share that soon shows.
    seen = seen_period_s(holds, pins, 400)
    assert seen == pytest.approx(period, rel=1e-9)
    if closed_form_holds(holds, pins):
        assert closed_period_s(holds, pins) == pytest.approx(seen, rel=1e-9)
    else:
        assert closed_period_s(holds, pins) <= seen * (1 + 1e-9)


def test_crosswise_groups_take_longer_than_the_closed_form() -> None:
    """A job on nodes 0 and 1, then one on each of two overlapping pairs: nobody can overlap."""
    one = Holds(100.0, 0.0, 10.0, 0.0)
    pins = [frozenset({0, 1}), frozenset({1, 2}), frozenset({2, 0})]
    assert not closed_form_holds([one] * 3, pins)
    assert closed_period_s([one] * 3, pins) == 200
    assert period_s([one] * 3, pins) == 300


def test_two_equal_jobs_over_saturate_a_pair_and_are_still_cheaper() -> None:
    """7B-8K-S of RollMux's Fig. 2, without switches."""
    both = layout(job("a", 134, 113), job("b", 134, 113))
    assert both.period_s() == 268
    alone = layout(job("a", 134, 113))
    assert [both.period_s() / work for work in both.works_s()] == pytest.approx([268 / 247] * 2)
    price = both.price_of_work([268, 268])
    assert 2 * alone.price_of_work([247]) / price == pytest.approx(1.843, abs=1e-3)


# -- turns -------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_no_node_is_held_twice_and_everyone_gets_on(order: Order, seed: int) -> None:
    rng = random.Random(seed)
    turns = Turns(order)
    nodes = {f"job {n}": rng.sample(range(4), rng.randint(1, 4)) for n in range(rng.randint(1, 6))}
    for name in nodes:
        turns.join(name, nodes[name], rng.uniform(1, 2))
    held: dict[object, str] = {}
    state: dict[str, tuple[str, Phase]] = dict.fromkeys(nodes, ("idle", "rollout"))
    done = dict.fromkeys(nodes, 0)

    def take(granted: list[tuple[str, Phase]]) -> None:
        for name, phase in granted:
            assert state[name] == ("waits", phase)
            state[name] = ("holds", phase)
            for node in nodes[name] if phase == "rollout" else [TRAINING]:
                assert node not in held, (node, held[node], name)
                held[node] = name

    now_s = 0.0
    for _ in range(400):
        now_s += rng.random()
        movable = [name for name, (what, _) in state.items() if what != "waits"]
        assert movable, "all wait: a circle"
        name = rng.choice(movable)
        what, phase = state[name]
        if what == "idle":
            state[name] = ("waits", phase)
            take(turns.ask(name, phase, now_s))
        else:
            for node in [node for node, one in held.items() if one == name]:
                del held[node]
            state[name] = ("idle", "train" if phase == "rollout" else "rollout")
            done[name] += 1
            take(turns.leave(name, phase, now_s))
    # Nobody starves: who is furthest behind is a few turns behind, as far as it was asked to move.
    assert min(done.values()) > 0
    if order == "round_robin":
        assert max(done.values()) - min(done.values()) <= 3, "phases: two, and one under way"


def test_a_wide_job_is_not_overtaken_for_ever() -> None:
    turns = Turns("first_come")
    turns.join("wide", [0, 1], 1.5)
    for name, node in (("a", 0), ("b", 1)):
        turns.join(name, [node], 1.5)
        assert turns.ask(name, "rollout", 0.0) == [(name, "rollout")]
    assert turns.ask("wide", "rollout", 1.0) == []
    assert turns.leave("a", "rollout", 2.0) == []
    turns.ask("a", "train", 2.0)
    turns.leave("a", "train", 3.0)
    assert turns.ask("a", "rollout", 3.0) == [], "node 0 is free, but wide was first"
    assert turns.leave("b", "rollout", 4.0) == [("wide", "rollout")]


def test_the_job_with_the_least_slack_comes_first() -> None:
    turns = Turns("least_slack")
    for node, (name, slo) in enumerate((("first", 2.0), ("loose", 2.0), ("tight", 1.01))):
        turns.join(name, [node], slo)
        assert turns.ask(name, "rollout", 0.0)
    for name in ("first", "loose", "tight"):
        turns.leave(name, "rollout", 100.0)
        turns.ask(name, "train", 100.0)
    assert turns.leave("first", "train", 110.0) == [("tight", "train")]


# -- forecasts ---------------------------------------------------------------------


def test_fixed_iterations_are_foreseen_by_the_period() -> None:
    both = layout(job("a", 134, 113), job("b", 134, 113))
    found = foresee(both, "round_robin") or []
    assert [one.slowdown for one in found] == [both.period_s() / work for work in both.works_s()]
    assert all(one.deviation == 0 for one in found)


@pytest.mark.parametrize("order", ORDERS)
def test_a_job_alone_is_not_slowed_down(order: Order) -> None:
    varied = job("a", 1, 1)
    rounds = (RoundTimes(rollout_s=(80, 100, 150), train_s=(60, 70, 90), after_s=5),)
    alone = layout(structs.replace(varied, rounds=rounds))
    (found,) = foresee(alone, order) or []
    assert found.slowdown == pytest.approx(1)
    assert found.bound(0.99, 100) == pytest.approx(1)


def test_more_confidence_is_a_higher_bound_and_more_iterations_a_lower_one() -> None:
    rounds = (RoundTimes(rollout_s=(50, 100, 300), train_s=(40, 80, 200)),)
    jobs = [job(name, 1, 1, rounds=rounds) for name in "ab"]
    first, _ = foresee(layout(*jobs), "round_robin") or []
    assert first.deviation > 0
    assert first.slowdown < first.bound(0.9, 100) < first.bound(0.99, 100)
    assert first.bound(0.99, 10_000) < first.bound(0.99, 100)


# -- what a job may be -------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"slo": 0.9}, "alone a job has a slowdown of 1"),
        ({"slo": float("nan")}, "slo"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"rollout_memory_gib": -1.0}, "rollout_memory_gib"),
        ({"tail_share": 1.0}, "tail_share"),
        ({"rounds": ()}, "rounds"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        structs.replace(job("a", 10, 10), **change)


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf")])
def test_phases_are_seconds(wrong: float) -> None:
    with pytest.raises(ValueError, match="more than 0 seconds"):
        RoundTimes(rollout_s=(wrong,), train_s=(1,))
