"""When another layout of a pipeline is worth a switch, and which."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from rollpacker.pipeline.plan.layout import (
    CONFIRM_STEPS,
    QUIET_STEPS,
    Layout,
    MeasuredSweep,
    Proposal,
    Relayouts,
    ShardTimes,
    better_places,
    faster_split,
    link_pairs,
    shard_pairs,
)
from rollpacker.pipeline.plan.work import Link, Load, OpCost, StageCost

LOADS = [Load(tokens=1000)] * 8
LINKS = [Link()]


def costs(layers, slowness, head=0.0) -> list[StageCost]:
    """A layer's op takes 1 ms for 1,000 tokens."""
    works = [*layers[:-1], layers[-1] + head]
    ops = [OpCost(per_token_s=1e-6 * n * f) for n, f in zip(works, slowness, strict=True)]
    return [StageCost(op, op, op) for op in ops]


def sweep(layers, slowness, head=0.0) -> MeasuredSweep:
    return MeasuredSweep(
        costs=costs(layers, slowness, head), loads=LOADS, links=LINKS, bytes_per_token=0.0
    )


# --- layers ---------------------------------------------------------------------------------------


def test_a_slow_stage_gets_fewer_layers_and_the_sweep_is_as_predicted():
    found = faster_split(costs((6, 6), (2.0, 1.0)), (6, 6), LOADS, LINKS)
    assert found is not None and found.layers == (4, 8)
    assert found.before_s / found.after_s > 1.3
    again = faster_split(costs(found.layers, (2.0, 1.0)), found.layers, LOADS, LINKS)
    assert again is None  # it is the best one
    back = faster_split(costs(found.layers, (1.0, 1.0)), found.layers, LOADS, LINKS)
    assert back is not None and back.layers == (6, 6)


def test_the_output_layer_is_no_slowness():
    even = costs((8, 4), (1.0, 1.0), head=4.0)
    assert faster_split(even, (8, 4), LOADS, LINKS, head_layers=4.0) is None
    slow = costs((8, 4), (1.0, 2.0), head=4.0)
    found = faster_split(slow, (8, 4), LOADS, LINKS, head_layers=4.0)
    assert found is not None and found.layers[1] < 4


def test_a_small_gain_is_none():
    slightly = costs((6, 6), (1.15, 1.0))
    assert faster_split(slightly, (6, 6), LOADS, LINKS) is None
    assert faster_split(costs((6, 6), (2.0, 1.0)), (6, 6), [], LINKS) is None


# --- places ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("slow", [(0, 1), (2, 3)])
def test_a_slow_pair_of_a_stage_becomes_a_link(slow):
    """All that is used then is known: the two links that are between shards now."""
    places, fast = (0, 1, 2, 3), {(0, 1), (2, 3), (0, 2), (1, 3)} - {slow}
    order = better_places(places, 2, slow={slow}, fast=fast)
    assert order == (0, 2, 1, 3)
    assert slow in set(link_pairs(order, 2)) and slow not in set(shard_pairs(order, 2))
    assert better_places(order, 2, slow={slow}, fast=fast) is None


def test_there_may_be_no_better_order():
    everything = set(itertools.combinations(range(4), 2))
    assert better_places((0, 1, 2, 3), 2, slow=everything, fast=()) is None
    assert better_places((0, 1, 2, 3), 1, slow={(0, 1)}, fast=()) is None
    assert better_places((0, 1), 2, slow={(0, 1)}, fast=()) is None


def test_slow_pairs_are_parted_wherever_they_are():
    draw = random.Random(0)
    for _ in range(50):
        places = [0, *draw.sample(range(1, 8), 7)]
        slow = {draw.choice(list(shard_pairs(places, 2)))}
        order = better_places(places, 2, slow=slow, fast=())
        assert order is not None and order[0] == 0 and sorted(order) == list(range(8))
        assert not slow & set(shard_pairs(order, 2))


# --- when -----------------------------------------------------------------------------------------


def relayouts(layers=(6, 6)) -> Relayouts:
    return Relayouts(Layout(layers=layers, places=(0, 1, 2, 3)))


def observed(relays: Relayouts, **given) -> Proposal | None:
    return relays.observe(
        **{"sweep": None, "shards": None, "left_steps": 1000.0, "switch_s": 10.0, **given}
    )


def times(pairs, usual_s=1e-3, **slower: float) -> ShardTimes:
    """A step of 10 s sends 1,000 times as much as a message."""
    seconds = {pair: usual_s * slower.get(f"p{pair[0]}{pair[1]}", 1.0) for pair in pairs}
    return ShardTimes(
        there_and_back_s=seconds, message_bytes=1 << 16, step_bytes=65536e3, step_s=10.0
    )


def until_proposed(relays: Relayouts, slow: MeasuredSweep) -> Proposal:
    found = [observed(relays, sweep=slow) for _ in range(CONFIRM_STEPS)]
    assert found[:-1] == [None] * (CONFIRM_STEPS - 1) and found[-1] is not None
    return found[-1]


def test_a_stage_that_is_held_up_now_and_then_is_none():
    relays = relayouts()
    for _ in range(10):
        for slowness in (2.0, 2.0, 1.0):
            assert observed(relays, sweep=sweep((6, 6), (slowness, 1.0))) is None


def test_a_proposal_pays_before_the_end_and_comes_once():
    slow, proposed, late = sweep((6, 6), (2.0, 1.0)), relayouts(), relayouts()
    for _ in range(5):
        assert observed(late, sweep=slow, left_steps=10.0, switch_s=10.0) is None
    found = until_proposed(proposed, slow)
    assert found is not None and found.layout.layers == (4, 8)
    assert "[4, 8] layers in the stages instead of [6, 6]" in found.why
    assert found.layout.places == (0, 1, 2, 3) and found.saved_s * 1000 > 10
    assert all(observed(proposed, sweep=slow) is None for _ in range(3 * QUIET_STEPS))


def test_after_a_switch_there_is_peace_for_a_while():
    relays = relayouts()
    found = until_proposed(relays, sweep((6, 6), (2.0, 1.0)))
    relays.switched(found.layout)
    healthy = sweep(found.layout.layers, (1.0, 1.0))  # it was slow for a moment
    waits = [observed(relays, sweep=healthy) for _ in range(QUIET_STEPS + 1)]
    assert waits[:-1] == [None] * QUIET_STEPS
    assert waits[-1] is not None and waits[-1].layout.layers == (6, 6)


def test_a_pair_that_turns_slow_is_parted_and_stays_so():
    relays, pairs = relayouts(), ((0, 1), (2, 3))
    assert all(observed(relays, shards=times(pairs)) is None for _ in range(5))
    found = [observed(relays, shards=times(pairs, p01=20.0)) for _ in range(2)]
    assert found[0] is None and found[1] is not None
    assert found[1].layout.places == (0, 2, 1, 3) and found[1].layout.layers == (6, 6)
    assert "between places 0 and 1" in found[1].why
    assert found[1].saved_s == pytest.approx(0.019 * 1000, rel=0.1)
    relays.switched(found[1].layout)
    after = times(((0, 2), (1, 3)))
    assert all(observed(relays, shards=after) is None for _ in range(2 * QUIET_STEPS))


def test_what_was_always_slow_is_parted_too_but_not_where_all_is():
    pairs, healthy = ((0, 1), (2, 3)), sweep((6, 6), (1.0, 1.0))
    for slower, links, expected in (
        ({"p01": 50.0}, None, (0, 2, 1, 3)),
        ({"p01": 50.0, "p23": 50.0}, [Link(latency_s=1e-3)], (0, 2, 1, 3)),
        ({"p01": 50.0, "p23": 50.0}, [Link(latency_s=20e-3)], None),
        ({"p01": 50.0, "p23": 50.0}, None, None),
    ):
        relays = relayouts()
        measured = None if links is None else dataclasses.replace(healthy, links=links)
        found = [observed(relays, sweep=measured, shards=times(pairs, **slower)) for _ in range(3)]
        assert (found[1] and found[1].layout.places) == expected
        assert found[0] is found[2] is None
