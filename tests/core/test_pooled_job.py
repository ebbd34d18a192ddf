"""A job that shares its pools: the same decisions as alone, one pool at a time, and a clock that
stands while it waits."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rollpacker.codec import to_plain
from rollpacker.core.commands import (
    Command,
    Commit,
    Drop,
    Enter,
    Finish,
    Launch,
    Leave,
    Replace,
    Resize,
    StartGradients,
    TrainOn,
)
from rollpacker.core.events import (
    Committed,
    EngineLost,
    Entered,
    PoolNeeded,
    PoolUnneeded,
    PromptsFetched,
    RunStarted,
    StopRequested,
    TrainerLost,
    TrainerReady,
)
from rollpacker.core.fleet.stream_plan import StreamConfig
from rollpacker.core.job.cadence import Cadence
from rollpacker.core.job.config import JobConfig
from rollpacker.core.job.job import Job
from rollpacker.core.job.phases import Phase
from rollpacker.core.job.pooled_job import PooledJob, make_job
from rollpacker.core.records import Session, decode, encode
from rollpacker.core.rounds.dynamic_sampling import DynamicSamplingConfig
from rollpacker.core.rounds.tail_batching import TailBatchingConfig
from rollpacker.run.replay import replay
from rollpacker.sim.unkind import UnkindConfig
from tests.core.engines import Faults
from tests.core.pools import AtRandom, FirstCome, check_log
from tests.core.test_devices import config_of as devices_of
from tests.core.test_fleet import checked
from tests.core.test_job import what_is_trained, worlds
from tests.core.trainer import TrainerFaults
from tests.core.world import World, commands_of, copy_of, events_of, published


def job_config(**keys: object) -> JobConfig:
    kept = {"prompts_per_step": 2, "samples_per_prompt": 2, "max_steps": 4} | keys
    return JobConfig(**kept)  # type: ignore[arg-type]


def shared(world: World, seed: int = 0, **keys: object) -> World:
    """The same world, whose job waits for its pools."""
    config = replace(world.config, shares_pools=True)
    return copy_of(world, **{"config": config, "broker": AtRandom(seed)} | keys)


def may_share(world: World) -> bool:
    return world.config.trainer_apart or not world.config.stream.enabled


def said(world: World) -> list[Command]:
    return [command for record in world.log for command in record.commands]


pooled_worlds = worlds.filter(may_share)


# -- what it decides -------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(pooled_worlds, st.integers(0, 10**6))
def test_it_decides_what_it_would_alone(world: World, seed: int) -> None:
    """Where nothing of a step is still under way when the next one begins: what comes late comes
    later to a job that waits."""
    assume(not world.unkind.verdict_delay_s)
    world.run()
    pooled = shared(world, seed).run()
    check_log(pooled.log)
    moved = (Enter, Leave, StartGradients)
    others = [one for one in said(pooled) if not isinstance(one, moved)]
    assert others == [one for one in said(world) if not isinstance(one, moved)]
    begun, begun_alone = (commands_of(one, StartGradients) for one in (pooled, world))
    assert begun == begun_alone, "later, but the same"
    assert pooled.finished == world.finished
    states, states_alone = (
        {step: state for step, (state, _, _) in one.snapshots.items()} for one in (pooled, world)
    )
    assert states == states_alone, "and what it has learned, of deadlines too"


@settings(max_examples=120, deadline=None)
@given(pooled_worlds, st.integers(0, 10**6), st.none() | st.integers(1, 200))
def test_pools_are_held_one_at_a_time_whatever_happens(
    world: World, seed: int, stop_at_event: int | None
) -> None:
    cadence = random.Random(seed).choice(
        (None, Cadence(checkpoint_every_steps=2, evaluates=True, eval_every_steps=2))
    )
    config = replace(world.config, shares_pools=True, cadence=cadence)
    pooled = shared(world, seed, config=config, stop_at_event=stop_at_event).run()
    check_log(pooled.log)
    assert not pooled.running
    job = pooled.job
    assert isinstance(job, PooledJob) and job.phase is Phase.DONE and not job._held
    fetched = [p for e in events_of(pooled, PromptsFetched) for p in e.prompts]
    settled = [g[0].prompt for c in commands_of(pooled, TrainOn) for g in c.groups]
    settled += [c.prompt for c in commands_of(pooled, Drop)]
    assert Counter(fetched) == Counter([*settled, *job.ledger.open])
    assert len(commands_of(pooled, Finish)) == 1


def faulty(seed: int, **keys: object) -> World:
    """Engines and trainer are lost at any moment, engines are laid out anew, steps are refilled,
    samples fail."""
    rng = random.Random(seed)
    streams = rng.random() < 0.5
    devices = rng.choice((1, 2, 4))
    degrees = (1,) if devices == 1 else rng.choice(((1,), (1, 2), (2, 1)))
    config = replace(
        devices_of(
            devices,
            degrees=degrees,
            release=False,
            tail=rng.choice((TailBatchingConfig(enabled=False), published())),
            p0=rng.choice((2, 4)),
        ),
        dynamic_sampling=DynamicSamplingConfig(enabled=rng.random() < 0.5, max_refills=2),
        stream=StreamConfig(enabled=streams),
        trainer_apart=streams,
        max_trainer_losses=3,
        shares_pools=True,
        cadence=Cadence(checkpoint_every_steps=2, evaluates=True, eval_every_steps=3),
    )
    kept = {
        "num_rows": 30,
        "seed": seed,
        "faults": Faults(loss_rate=rng.choice((0.0, 0.05, 0.2))),
        "trainer_faults": TrainerFaults(loss_rate=rng.choice((0.0, 0.05, 0.2))),
        "unkind": UnkindConfig(failure_rate=rng.choice((0.0, 0.1)), verdict_delay_s=20.0),
        "preemption_rate": rng.choice((0.0, 0.5)),
        "broker": AtRandom(seed),
    } | keys
    return World(config, **kept)  # type: ignore[arg-type]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.none() | st.integers(1, 400))
def test_losses_at_any_moment(seed: int, stop_at_event: int | None) -> None:
    world = faulty(seed, stop_at_event=stop_at_event).run()
    check_log(world.log)
    assert not world.failed
    if stop_at_event is None:
        checked(world)


def test_the_unkind_worlds_reach_every_corner() -> None:
    """A test that nothing happens in shows nothing."""
    seen: Counter[str] = Counter()
    for seed in range(120):
        often = {"trainer_faults": TrainerFaults(loss_rate=0.3)} if seed % 2 else {}
        world = faulty(seed, stop_at_event=seed % 60 or None, **often).run()
        assert world.driver is not None
        seen["gave up a wait"] += world.driver.num_given_up
        pool = entering = None
        for record in world.log:
            event = record.event
            lost = isinstance(event, EngineLost | TrainerLost)
            if lost and entering is not None:
                seen[f"{type(event).__name__} while it waits for {entering}"] += 1
            elif lost and pool is None:
                seen[f"{type(event).__name__} while it is parked"] += 1
            if isinstance(event, Entered):
                pool, entering = entering, None
                seen["replaced later"] += any(isinstance(c, Replace) for c in record.commands)
                seen["resized"] += any(isinstance(c, Resize) for c in record.commands)
            for command in record.commands:
                if isinstance(command, Enter):
                    entering = command.pool
                    seen[f"{command.purpose} on {command.pool}"] += 1
                elif isinstance(command, Leave):
                    pool = entering = None
    wanted = {
        "gave up a wait",
        "replaced later",
        "resized",
        "round on rollout",
        "step on train",
        "evaluation on rollout",
        "recovery on train",
        "EngineLost while it is parked",
        "TrainerLost while it is parked",
        *(f"{kind} while it waits for {pool}" for pool in ("rollout", "train")
          for kind in ("EngineLost", "TrainerLost")),
    }  # fmt: skip
    missing = wanted - {name for name, num in seen.items() if num}
    assert not missing, missing


@settings(max_examples=60, deadline=None)
@given(pooled_worlds, st.integers(0, 10**6), st.data())
def test_it_is_resumed_from_any_commit_alone_or_not(
    world: World, seed: int, data: st.DataObject
) -> None:
    assume(world.config.tail_batching.race == "generated" or not world.unkind.verdict_delay_s)
    pooled = shared(world, seed).run()
    gave_up = commands_of(pooled, Finish)[0].failed
    steps = sorted(pooled.snapshots)
    step = data.draw(st.sampled_from(steps[:-1] if gave_up else steps))
    resumed = pooled.resume_from(step)
    check_log(resumed.log)
    pooled.broker = None
    alone = pooled.resume_from(step, replace(world.config, shares_pools=False))
    expected = [c for c in commands_of(pooled, TrainOn) if c.step > step]
    for one in (resumed, alone):
        assert what_is_trained(commands_of(one, TrainOn)) == what_is_trained(expected)
        assert to_plain(one.job.ledger) == to_plain(pooled.job.ledger)
        assert one.finished == pooled.finished


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.data())
def test_a_log_replays_also_through_resumes(seed: int, data: st.DataObject) -> None:
    world = faulty(seed).run()
    step = data.draw(st.sampled_from(sorted(world.snapshots)))
    ends = next(n for n, r in enumerate(world.log) if committed(r.event, step))
    resumed = world.resume_from(step)
    plain = world.config.to_plain()
    entries = [
        Session(started_at="", time_s=0.0, step=0, job=plain),
        *world.log[:ends],
        Session(started_at="", time_s=world.committed_s[step], step=step, job=plain),
        *resumed.log,
    ]
    assert replay([decode(encode(entry)) for entry in entries]).difference is None


def committed(event: object, step: int) -> bool:
    return isinstance(event, Committed) and event.step == step


# -- its clock -------------------------------------------------------------------------


AUTO = published(prompt_factor="auto", sample_factor="auto")


@pytest.mark.parametrize("seed", range(5))
def test_what_it_learns_from_seconds_is_what_it_learns_alone(seed: int) -> None:
    config = job_config(
        max_steps=40, prompts_per_step=4, samples_per_prompt=4, tail_batching=AUTO, 
        max_response_tokens=400,
    )  # fmt: skip

    def length(sample: object, rng: random.Random) -> int:
        return min(400, int(rng.lognormvariate(3.0, 1.0)) + 1)

    world = World(config, num_rows=400, seed=seed, length=length).run()
    pooled = shared(world, seed).run()
    planner = world.job.lengths.planner
    assert planner is not None and planner.current is not None, "it never chose"
    assert pooled.job.lengths.state() == world.job.lengths.state()
    assert commands_of(pooled, TrainOn) == commands_of(world, TrainOn)
    assert isinstance(pooled.job, PooledJob) and pooled.job.waited_s > 100


# -- two jobs --------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 3))
def test_jobs_that_share_pools_are_never_both_on_one(seed: int, count: int) -> None:
    """And none waits for ever."""
    broker = FirstCome()
    jobs = [faulty(seed + n, broker=broker) for n in range(count)]
    held: list[object] = []
    for world in jobs:
        world.begin(RunStarted(time_s=0.0))
    while any(world.heap for world in jobs):
        world = min((one for one in jobs if one.heap), key=lambda one: one.heap[0][0])
        world.advance()
        pools = [one.driver.held for one in jobs if one.driver and one.driver.held]
        assert len(set(pools)) == len(pools), "two jobs on one pool"
        held.append(tuple(pools))
    for world in jobs:
        assert world.finished and not world.failed, world.job.waiting_for()
        check_log(world.log)
    assert max(map(len, held)) == 2, "they never worked at the same time"  # type: ignore[arg-type]
    assert not broker.holder and not any(broker.queue.values())


# -- one by one ------------------------------------------------------------------------


def waiting(**keys: object) -> Job:
    job = make_job(job_config(shares_pools=True, **keys))
    assert job.handle(RunStarted(time_s=0.0)) == [Enter(pool="rollout", purpose="round")]
    return job


def test_a_new_run_that_is_told_to_stop_while_it_waits_ends_without_a_step() -> None:
    job = waiting()
    stopped = job.handle(StopRequested(time_s=5.0, reason="enough"))
    assert stopped == [Leave(pool="rollout"), Finish(reason="enough")]
    assert job.waiting_for() == "nothing"


def after_a_commit(*, checkpointed: bool) -> Job:
    world = World(job_config(max_steps=9), num_rows=50).run()
    state, _, _ = world.snapshots[2]
    job = PooledJob.restore(job_config(max_steps=9, shares_pools=True), state)
    event = Committed(time_s=0.0, step=2, checkpointed=checkpointed)
    assert job.handle(event) == [Enter(pool="rollout", purpose="round")]
    assert job.waiting_for() == "the rollout pool, which other jobs use too"
    return job


def test_a_stop_between_two_steps_needs_no_pool_and_leaves_a_checkpoint() -> None:
    told = StopRequested(time_s=1.0)
    finish = Finish(reason="asked to stop")
    assert after_a_commit(checkpointed=True).handle(told) == [Leave(pool="rollout"), finish]
    job = after_a_commit(checkpointed=False)
    leave, commit = job.handle(told)
    assert leave == Leave(pool="rollout")
    assert isinstance(commit, Commit) and (commit.step, commit.stopping) == (2, True)
    assert job.handle(Committed(time_s=2.0, step=2, checkpointed=True)) == [finish]


def test_a_commit_forgets_losses_though_the_next_step_waits() -> None:
    """Alone, the commit parts them; and waiting for a pool parts nothing."""
    config = job_config(shares_pools=True, max_trainer_losses=2)
    job = make_job(config)
    job.handle(TrainerLost(time_s=0.0, incarnation=0, reason="killed"))
    job.handle(TrainerReady(time_s=0.0, incarnation=1, version=0))
    job.phase = Phase.COMMITTING
    job.progress.step = 1
    job.handle(Committed(time_s=0.0, step=1, checkpointed=True))
    again = job.handle(TrainerLost(time_s=1.0, incarnation=1, reason="killed"))
    assert not any(isinstance(one, Finish) for one in again), "the first loss was forgotten"
    job.handle(Entered(time_s=2.0, pool="rollout"))
    last = job.handle(TrainerLost(time_s=3.0, incarnation=2, reason="killed"))
    assert isinstance(last[-1], Finish), "the second one was not"


def test_a_pool_that_is_needed_for_itself() -> None:
    job = make_job(job_config(shares_pools=True))
    asked = job.handle(PoolNeeded(time_s=0.0, pool="rollout", purpose="evaluation"))
    assert asked == [Enter(pool="rollout", purpose="evaluation")]
    assert job.handle(Entered(time_s=9.0, pool="rollout")) == []
    assert job.handle(PoolUnneeded(time_s=12.0)) == [Leave(pool="rollout")]
    asked = job.handle(PoolNeeded(time_s=12.0, pool="train", purpose="recovery"))
    assert asked == [Enter(pool="train", purpose="recovery")]
    assert job.handle(PoolUnneeded(time_s=13.0)) == [Leave(pool="train")], "a wait given up"
    with pytest.raises(AssertionError, match="nobody needed"):
        job.handle(PoolUnneeded(time_s=14.0))
    with pytest.raises(AssertionError, match="waits for None"):
        job.handle(Entered(time_s=14.0, pool="train"))


def test_devices_of_a_round_are_not_those_of_training() -> None:
    stream = StreamConfig(enabled=True, reward_wait=True)
    with pytest.raises(ValueError, match="does not go with shared pools"):
        job_config(shares_pools=True, stream=stream)
    assert job_config(shares_pools=True, stream=stream, trainer_apart=True).shares_pools


def test_a_checkpoint_is_the_same_as_alone() -> None:
    alone = World(job_config(), num_rows=50).run()
    pooled = shared(alone).run()
    assert {step: one for step, (one, _, _) in pooled.snapshots.items()} == {
        step: one for step, (one, _, _) in alone.snapshots.items()
    }
    assert commands_of(pooled, Launch) == commands_of(alone, Launch)
