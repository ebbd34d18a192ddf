"""What deferred trajectories leave to their next launch: the core counts, the world compares."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.core.checks.acting import ActingConfig, Retracing
from rollpacker.core.commands import Launch, TrainOn
from rollpacker.core.events import SampleAborted, SampleGenerated
from rollpacker.core.fleet.fleet import FleetConfig
from rollpacker.core.ids import SampleId
from rollpacker.core.rounds.tail_batching import TailBatchingConfig, Tier
from rollpacker.sim.unkind import UnkindConfig
from tests.core.engines import Faults
from tests.core.environments import Dialogues
from tests.core.test_turns import ACTING, UNKIND, check_run, job_config, replayed
from tests.core.world import World, commands_of, events_of

QUEUE, POOL = TailBatchingConfig(), TailBatchingConfig(stragglers="pool", prompt_factor=2.0)
SAME = Dialogues(repeats=True, over_rate=0.15)


def carried(world: World) -> dict[SampleId, int]:
    """By launched sample, as far as anything was left to it."""
    launches = commands_of(world, Launch)
    return {
        sample: tokens
        for one in launches
        for sample, tokens in zip(one.samples, one.carried, strict=False)
        if tokens
    }


def num_drawn(world: World) -> int:
    """Tokens that engines drew one after another."""
    found = 0
    for kind in (SampleGenerated, SampleAborted):
        found += sum(e.num_tokens - (e.num_kept or 0) for e in events_of(world, kind))
    return found


@pytest.mark.parametrize("tail", [QUEUE, POOL])
@pytest.mark.parametrize("begins", [False, True])
def test_deferred_trajectories_leave_all_that_they_have(
    tail: TailBatchingConfig, begins: bool
) -> None:
    """The world asserts at each launch that the core counts what is there."""
    acting = ActingConfig(begins=begins)
    world = World(job_config(acting, tail_batching=tail), num_rows=60, dialogues=SAME)
    check_run(world.run())
    replayed(world)
    assert carried(world)
    kept = [e for e in events_of(world, SampleGenerated) if e.num_kept]
    assert any(e.num_kept == e.num_tokens for e in kept)
    assert any(e.num_kept < e.num_tokens for e in kept)


def test_less_is_drawn_and_the_same_is_trained_on() -> None:
    """A long round awaits all, so that who wins does not hang on what was carried."""
    trained, drawn = [], []
    for carry in ("exact", "none"):
        tail = replace(QUEUE, carry=carry)
        world = World(job_config(tail_batching=tail), num_rows=60, dialogues=SAME)
        check_run(world.run())
        groups = [c.groups for c in commands_of(world, TrainOn)]
        walks = world.walking.walks
        trained.append([[[walks[s].has for s in group] for group in step] for step in groups])
        drawn.append(num_drawn(world))
    assert trained[0] == trained[1]
    assert drawn[0] < 0.9 * drawn[1]


def test_a_shorter_launch_does_not_lose_what_longer_ones_had() -> None:
    """While all comes out as it was, the furthest launch counts."""
    tail = replace(POOL, prompt_factor=3.0, max_deferrals=50)
    slow = replace(SAME, slow_rate=0.3, seconds=30.0)
    world = World(job_config(tail_batching=tail), num_rows=100, dialogues=slow)
    check_run(world.run())
    found = carried(world)
    nexts = [(n, found.get(SampleId(s.prompt, s.index, s.attempt + 1))) for s, n in found.items()]
    grown = [(n, then) for n, then in nexts if then is not None]
    assert grown and all(then >= n for n, then in grown)
    assert any(then == n for n, then in grown) and any(then > n for n, then in grown)


def test_a_resumed_run_carries_what_the_checkpoint_has() -> None:
    world = World(job_config(tail_batching=QUEUE), num_rows=40, dialogues=SAME)
    check_run(world.run())
    resumed = 0
    for step in range(1, 6):
        again = world.resume_from(step)
        expected = [c for c in commands_of(world, TrainOn) if c.step > step]
        assert commands_of(again, TrainOn) == expected
        resumed += bool(world.snapshots[step][0]["queue"])
    assert resumed


@settings(max_examples=60, deadline=None)
@given(
    acting=ACTING,
    unkind=UNKIND,
    tail=st.sampled_from(
        [
            QUEUE,
            POOL,
            replace(POOL, prompt_factor=4.0),
            replace(QUEUE, tiers=(Tier(prompt_factor=1.5),)),
        ]
    ),
    repeats=st.booleans(),
    mismatch=st.sampled_from([0.0, 0.2, 0.8]),
    engines=st.sampled_from([None, 1, 3]),
    faulty=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_the_core_counts_what_is_there(
    acting: ActingConfig,
    unkind: UnkindConfig,
    tail: TailBatchingConfig,
    repeats: bool,
    mismatch: float,
    engines: int | None,
    faulty: bool,
    seed: int,
) -> None:
    fleet = None if engines is None else FleetConfig(num_engines=engines, moves=faulty)
    config = job_config(*(acting, 3, 2), tail_batching=tail, fleet=fleet, max_retries=3)
    faults = Faults(loss_rate=0.02) if faulty and fleet is not None else None
    world = World(config, num_rows=25, seed=seed, unkind=unkind, faults=faults)
    world.dialogues = Dialogues(repeats=repeats, mismatch=mismatch, over_rate=0.15)
    world.run()
    if not world.failed:
        check_run(world)
    replayed(world)


def test_how_far_it_has_come_out_the_same() -> None:
    one = Retracing(carried=20)
    one.drawn(0, 8, 8)
    assert (one.kept, one.goes_on) == (8, True)
    assert not one.stopped(10, 4, None)  # nobody has looked
    assert one.stopped(10, 4, 4) and (one.kept, one.goes_on) == (14, True)
    one.drawn(10, 12, 10)  # there were no more
    assert (one.kept, one.goes_on) == (20, False)
    assert one.stopped(24, 3, None) and not one.stopped(24, 0, None)
    other = Retracing(carried=20)
    other.drawn(0, 8, 5)
    other.drawn(10, 8, None)
    assert (other.kept, other.goes_on) == (5, False)
    assert (Retracing().kept, Retracing().goes_on) == (None, False)
