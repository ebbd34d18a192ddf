"""A round that only waits for its environments leaves the rollout pool, and comes back."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.core.checks.acting import ActingConfig
from rollpacker.core.commands import (
    Commit,
    Continue,
    Enter,
    Launch,
    Leave,
    Remind,
    Score,
    TrainOn,
)
from rollpacker.core.events import (
    Acted,
    EngineLost,
    Entered,
    Reminded,
    RunStarted,
    SampleAborted,
    SampleFailed,
    SampleGenerated,
    WeightsSynced,
)
from rollpacker.core.fleet.fleet import FleetConfig
from rollpacker.core.ids import PoolName, SampleId
from rollpacker.core.job.stay import Stay
from rollpacker.core.records import Session, decode, encode
from rollpacker.run.replay import replay
from tests.core.engines import Faults
from tests.core.environments import Dialogues
from tests.core.pools import AtRandom, FirstCome, check_log
from tests.core.test_job import what_is_trained
from tests.core.test_turns import ACTING, NO_RACE, TAILS, UNKIND, check_run, job_config, replayed
from tests.core.world import World, commands_of, copy_of

SLOW = Dialogues(slow_rate=0.3, seconds=8.0)
"""A training takes 1.1 s."""
ENDS = SampleGenerated | SampleAborted | SampleFailed


# -- the rule --------------------------------------------------------------------------


def trained(*, began_s: float = 0.0, took_s: float = 10.0, switch_s: float = 1.0) -> Stay:
    stay = Stay()
    stay.woke(switch_s)
    stay.trains(began_s)
    stay.trained(began_s + took_s)
    return stay


def test_it_stays_as_long_as_the_last_training_and_a_switch_took() -> None:
    stay = trained()
    assert stay.look(100.0, rests=False) is None and not stay.is_over
    assert stay.look(101.0, rests=True) == 12.0 and not stay.is_over
    assert stay.look(105.0, rests=True) is None, "it will be reminded"
    stay.reminded()
    assert stay.look(113.0, rests=True) is None and stay.is_over
    assert stay.look(113.0, rests=False) is None and not stay.is_over


def test_an_answer_begins_it_anew() -> None:
    stay = trained()
    assert stay.look(0.0, rests=True) == 12.0
    assert stay.look(5.0, rests=False) is None
    assert stay.look(6.0, rests=True) == 12.0
    stay.reminded()  # the first reminder was on its way already
    assert stay.look(12.0, rests=True) == 6.0 and not stay.is_over
    stay.reminded()
    # A stamp is rounded; to be reminded again in less than that would never end.
    assert stay.look(18.0 - 1e-7, rests=True) is None and stay.is_over


def test_who_has_not_trained_yet_stays() -> None:
    stay = Stay()
    assert stay.look(0.0, rests=True) is None
    assert stay.look(1e6, rests=True) is None and not stay.is_over


# -- whole runs ------------------------------------------------------------------------


def away_in_a_round(world: World) -> Counter[str]:
    """What happened while a round had left its pool."""
    seen: Counter[str] = Counter()
    pool: PoolName | None = None
    entering: Enter | None = None
    rolling = False
    for record in world.log:
        event = record.event
        if isinstance(event, Entered):
            pool, entering = event.pool, None
        is_away = rolling and pool != "rollout"
        if is_away:
            seen[type(event).__name__] += 1
        for command in record.commands:
            match command:
                case Enter():
                    entering = command
                    seen[f"entered for {command.purpose}"] += 1
                case Leave(pool="rollout") if entering is not None:
                    seen[f"gave up a wait for {entering.purpose}"] += 1
                    entering = None
                case Leave(pool="rollout"):
                    seen["left"] += rolling
                    pool = None
                case Leave():
                    pool = entering = None
                case Launch() | Continue():
                    assert pool == "rollout", command
                    rolling = True
                    seen[f"{type(command).__name__} at last"] += isinstance(event, Entered)
                case TrainOn() | Commit():
                    rolling = False
    return seen


def check_stays(world: World) -> None:
    """With nothing in an engine the pool is held for no longer than was said, once a training has
    shown how long that is."""
    pool: PoolName | None = None
    under_way: set[SampleId] = set()
    rests_since_s: float | None = None
    began_s = took_s = switch_s = 0.0
    for record in world.log:
        now, event = record.time_s, record.event
        if rests_since_s is not None and took_s:
            assert now - rests_since_s <= took_s + 2 * switch_s + 1e-5, f"{now}: {event}"
        match event:
            case Entered(pool="train"):
                pool, began_s = "train", now
            case Entered():
                pool, switch_s = "rollout", event.switch_s
            case WeightsSynced():
                took_s = now - began_s
            case SampleGenerated() | SampleAborted() | SampleFailed():
                under_way.discard(event.sample)
            case _:
                pass
        for command in record.commands:
            if isinstance(command, Launch | Continue):
                under_way.update(command.samples)
            elif isinstance(command, Leave):
                pool = None
        rests = pool == "rollout" and not under_way
        rests_since_s = (now if rests_since_s is None else rests_since_s) if rests else None


worlds_of_turns = {
    "acting": ACTING,
    "unkind": UNKIND,
    "tail": TAILS,
    "engines": st.sampled_from([None, 1, 3]),
    "seed": st.integers(0, 10**6),
}


@settings(max_examples=80, deadline=None)
@given(**worlds_of_turns, faulty=st.booleans(), stop_at_event=st.none() | st.integers(1, 300))
def test_no_continuation_is_lost_whatever_happens(
    acting: ActingConfig, unkind, tail, engines: int | None, seed: int, faulty: bool,
    stop_at_event: int | None,
) -> None:  # fmt: skip
    fleet = None if engines is None else FleetConfig(num_engines=engines, moves=faulty)
    config = job_config(
        *(acting, 3, 2),
        tail_batching=tail,
        fleet=fleet,
        max_retries=3,
        shares_pools=True,
    )
    faulty = faulty and fleet is not None
    world = World(
        config,
        num_rows=18,
        seed=seed,
        unkind=unkind,
        faults=Faults(loss_rate=0.02) if faulty else None,
        dialogues=SLOW,
        broker=AtRandom(seed, most_s=20.0),
        stop_at_event=stop_at_event,
    ).run()
    check_log(world.log)
    replayed(world)
    away_in_a_round(world)
    if not faulty:
        check_stays(world)
    if not world.failed and stop_at_event is None:
        check_run(world)
        assert not world.job._answered  # type: ignore[attr-defined]


def calm(seed: int, **settings: object) -> World:
    """Nobody races, nothing is lost: what is trained on hangs on nobody's seconds."""
    acting = ActingConfig(begins=seed % 2 == 0)
    config = job_config(acting, 3, 2, tail_batching=NO_RACE, **settings)
    return World(config, num_rows=18, seed=seed, dialogues=SLOW)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.data())
def test_what_is_trained_on_is_what_would_be_alone_also_through_resumes(
    seed: int, data: st.DataObject
) -> None:
    alone = calm(seed).run()
    config = replace(alone.config, shares_pools=True)
    pooled = copy_of(alone, config=config, broker=AtRandom(seed, most_s=20.0)).run()
    trained = commands_of(alone, TrainOn)
    assert what_is_trained(commands_of(pooled, TrainOn)) == what_is_trained(trained)
    assert {c.sample for c in commands_of(pooled, Score)} == {
        c.sample for c in commands_of(alone, Score)
    }
    step = data.draw(st.sampled_from(sorted(pooled.snapshots)))
    resumed = pooled.resume_from(step)
    check_log(resumed.log)
    rest = [c for c in trained if c.step > step]
    assert what_is_trained(commands_of(resumed, TrainOn)) == what_is_trained(rest)


def test_alone_nothing_of_it_is_said() -> None:
    world = calm(1).run()
    assert not [c for kind in (Enter, Leave, Remind) for c in commands_of(world, kind)]


@pytest.mark.parametrize("fleet", [None, FleetConfig(num_engines=2)])
def test_an_older_log_whose_rounds_stayed_replays_as_it_was(fleet: FleetConfig | None) -> None:
    """It does not say what rounds do while environments work."""
    acting = ActingConfig(leaves_pool=False)
    broker = AtRandom(1, most_s=20.0)
    config = job_config(acting, 3, 2, shares_pools=True, fleet=fleet)
    older = World(config, num_rows=18, seed=1, dialogues=SLOW, broker=broker).run()
    assert commands_of(older, Enter) and not commands_of(older, Remind)
    assert not away_in_a_round(older)["entered for turns"]
    plain = config.to_plain()
    assert "leaves_pool" not in plain["acting"]
    assert replay_of(older, plain) is None
    now = replay_of(older, {**plain, "acting": {**plain["acting"], "leaves_pool": True}})
    assert now is not None and "Remind" in now


def replay_of(world: World, job: dict[str, Any]) -> str | None:
    """Where another job's answers to the world's events differ from its own."""
    session = Session(started_at="", time_s=0.0, step=0, job=job)
    return replay(decode(encode(entry)) for entry in (session, *world.log)).difference


def test_the_worlds_reach_every_corner() -> None:
    """A test that nothing happens in shows nothing."""
    seen: Counter[str] = Counter()
    for seed in range(40):
        rng = random.Random(seed)
        faulty = seed % 3 == 0
        config = job_config(
            *(ActingConfig(begins=seed % 2 == 0), 3, 2),
            fleet=FleetConfig(num_engines=2),
            tail_batching=NO_RACE if seed % 4 == 0 else job_config().tail_batching,
            max_retries=3,
            shares_pools=True,
        )
        seen += away_in_a_round(
            World(
                config,
                num_rows=30,
                seed=seed,
                faults=Faults(loss_rate=0.05) if faulty else None,
                dialogues=replace(SLOW, over_rate=rng.choice((0.25, 0.6))),
                broker=AtRandom(seed, most_s=60.0, none_share=0.1),
            ).run()
        )
    wanted = {
        "left",
        "entered for turns",
        "gave up a wait for turns",
        "Continue at last",
        "Launch at last",
        *(one.__name__ for one in (Acted, EngineLost, Reminded)),
    }
    missing = wanted - {name for name, number in seen.items() if number}
    assert not missing, (missing, seen)


@pytest.mark.parametrize("count", [2, 3])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_jobs_that_leave_for_each_other_all_end(count: int, seed: int) -> None:
    broker = FirstCome()
    jobs = [copy_of(calm(seed + n, shares_pools=True), broker=broker) for n in range(count)]
    for world in jobs:
        world.begin(RunStarted(time_s=0.0))
    while any(world.heap for world in jobs):
        min((one for one in jobs if one.heap), key=lambda one: one.heap[0][0]).advance()
        pools = [one.driver.held for one in jobs if one.driver and one.driver.held]
        assert len(set(pools)) == len(pools), "two jobs on one pool"
    for world in jobs:
        assert world.finished and not world.failed, world.job.waiting_for()
        check_log(world.log)
        check_stays(world)
        check_run(world)
    assert not broker.holder and not any(broker.queue.values())
