"""A trainer that is lost and comes back, at whatever moment."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollpacker.core.commands import Commit, Finish, Launch, RestoreTrainer, SyncWeights, TrainOn
from rollpacker.core.events import (
    Committed,
    PromptsFetched,
    RunStarted,
    SampleGenerated,
    SampleScored,
    Trained,
    TrainerLost,
    TrainerReady,
    WeightsSynced,
)
from rollpacker.core.fleet.fleet import FleetConfig
from rollpacker.core.fleet.stream_plan import StreamConfig
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.job.config import JobConfig
from rollpacker.core.job.job import Job
from rollpacker.core.job.phases import Phase
from rollpacker.core.records import Session, decode, encode
from rollpacker.core.rounds.tail_batching import TailBatchingConfig
from rollpacker.run.replay import replay
from tests.core.engines import Faults
from tests.core.test_fleet import checked, trained
from tests.core.trainer import TrainerFaults
from tests.core.world import World, commands_of, events_of

OFF = TailBatchingConfig(enabled=False)


def world_of(
    loss_rate: float,
    *,
    seed: int = 0,
    num_engines: int = 1,
    engine_loss_rate: float = 0.0,
    tail: TailBatchingConfig = OFF,
    streams: bool = False,
    max_losses: int = 3,
    **faults: object,
) -> World:
    config = JobConfig(
        prompts_per_step=4,
        samples_per_prompt=3,
        max_steps=None,
        tail_batching=tail,
        stream=StreamConfig(enabled=streams),
        trainer_apart=streams,
        fleet=FleetConfig(num_engines=num_engines),
        max_trainer_losses=max_losses,
    )
    return World(
        config,
        num_rows=40,
        seed=seed,
        faults=Faults(loss_rate=engine_loss_rate),
        trainer_faults=TrainerFaults(loss_rate=loss_rate, **faults),  # type: ignore[arg-type]
    )


def versions(world: World) -> list[tuple[int, int]]:
    return [(event.step, event.version) for event in events_of(world, Trained)]


@settings(max_examples=60, deadline=None)
@example(  # lost once more after the end
    num_engines=1, loss_rate=0.3, engine_loss_rate=0.1, streams=False, is_off=True, seed=512
)
@given(
    num_engines=st.integers(1, 3),
    loss_rate=st.sampled_from((0.01, 0.05, 0.3)),
    engine_loss_rate=st.sampled_from((0.0, 0.1)),
    streams=st.booleans(),
    is_off=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_whenever_it_is_lost_every_step_is_trained_once_on_the_same(
    num_engines: int,
    loss_rate: float,
    engine_loss_rate: float,
    streams: bool,
    is_off: bool,
    seed: int,
) -> None:
    tail = OFF if is_off else TailBatchingConfig(prompt_factor=1.5)
    settings = {"seed": seed, "num_engines": num_engines, "tail": tail, "streams": streams}
    world = world_of(loss_rate, engine_loss_rate=engine_loss_rate, **settings).run()  # type: ignore[arg-type]
    checked(world)
    assert not world.failed
    plain = world_of(0.0, **settings).run()  # type: ignore[arg-type]
    assert trained(world) == trained(plain)
    for kind in (TrainOn, SyncWeights, Commit):
        steps = commands_of(world, kind)
        assert len(set(map(repr, steps))) == len(steps), "said again"
    assert versions(world) == [(n, n) for n in range(1, len(versions(world)) + 1)]
    finished = [any(isinstance(c, Finish) for c in record.commands) for record in world.log]
    log = world.log[: finished.index(True)]  # one that is lost after the end is nobody's
    losses = sum(isinstance(record.event, TrainerLost) for record in log)
    orders = commands_of(world, RestoreTrainer)
    assert [one.incarnation for one in orders] == list(range(1, losses + 1))


def test_losses_come_in_every_phase() -> None:
    at: Counter[Phase] = Counter()
    num_again = 0
    for seed in range(25):
        world = world_of(0.1, seed=seed, streams=bool(seed % 2))
        handle = world.job.handle

        def watch(event, handle=handle, job=world.job):
            if isinstance(event, TrainerLost):
                at[job.phase] += 1
            return handle(event)

        world.job.handle = watch  # type: ignore[method-assign]
        checked(world.run())
        num_again += len(events_of(world, TrainerLost)) > len(events_of(world, TrainerReady))
    wanted = {Phase.FETCHING, Phase.ROLLING, Phase.TRAINING, Phase.SYNCING, Phase.COMMITTING}
    assert wanted <= set(at), at
    assert num_again, "it was never lost on its way back"


def test_a_loss_during_a_round_leaves_the_round_alone() -> None:
    settings = {"during": (Phase.ROLLING,), "ready_s": 1.0}
    world, plain = world_of(0.2, **settings).run(), world_of(0.0).run()
    assert len(events_of(world, TrainerLost)) > 5
    launched = [c.samples for c in commands_of(plain, Launch)]
    assert [c.samples for c in commands_of(world, Launch)] == launched
    ends = [(e.time_s, e.sample) for e in events_of(plain, SampleGenerated)]
    assert [(e.time_s, e.sample) for e in events_of(world, SampleGenerated)][:20] == ends[:20]


def test_three_losses_without_a_commit_between_them_end_the_run() -> None:
    world = world_of(0.3, seed=1, most_between_commits=3, again_rate=1.0).run()
    assert world.failed and world.finished is not None
    assert "the trainer was lost 3 times without a committed step" in world.finished
    assert world.finished.count("it was killed") == 3
    last = world.log[-1]
    assert isinstance(last.event, TrainerLost) and isinstance(last.commands[-1], Finish)


def in_training(max_losses: int | None = 3) -> Job:
    """A job that waits for the step of one prompt with one sample."""
    job = Job(
        JobConfig(
            prompts_per_step=1,
            samples_per_prompt=1,
            max_steps=9,
            min_verdicts=1,
            tail_batching=OFF,
            max_trainer_losses=max_losses,
        )
    )
    job.handle(RunStarted(time_s=0.0))
    go_on(job, 0)
    return job


def go_on(job: Job, row: int) -> None:
    prompt = PromptId("train", 0, row)
    fetched = PromptsFetched(time_s=0.0, prompts=(prompt,), epoch_ended=False)
    (launch,) = job.handle(fetched)
    (sample,) = launch.samples
    assert isinstance(sample, SampleId)
    job.handle(
        SampleGenerated(
            time_s=0.0, sample=sample, num_tokens=2, finish_reason="stop", version=job.version
        )
    )
    (train_on,) = job.handle(SampleScored(time_s=0.0, sample=sample, value=1.0))
    assert isinstance(train_on, TrainOn)


def lost(incarnation: int) -> TrainerLost:
    return TrainerLost(time_s=0.0, incarnation=incarnation, reason=f"killed {incarnation}")


def test_a_commit_forgets_losses_and_what_is_known_already_counts_once() -> None:
    job = in_training()
    assert job.handle(lost(0)) == [RestoreTrainer(incarnation=1, version=0)]
    assert job.handle(lost(0)) == [], "known already"
    assert job.handle(lost(1)) == [RestoreTrainer(incarnation=2, version=0)]
    assert job.handle(TrainerReady(time_s=0.0, incarnation=2, version=0)) == []
    assert job.phase is Phase.TRAINING
    assert job.handle(Trained(time_s=0.0, step=1, version=1)) == [SyncWeights(version=1)]
    job.handle(WeightsSynced(time_s=0.0, version=1))
    job.handle(Committed(time_s=0.0, step=1))
    go_on(job, 1)
    assert job.handle(lost(2)) == [RestoreTrainer(incarnation=3, version=1)]
    assert job.handle(lost(3)) == [RestoreTrainer(incarnation=4, version=1)]
    (finish,) = job.handle(lost(4))
    assert isinstance(finish, Finish) and finish.failed
    assert finish.reason.endswith("(killed 2; killed 3; killed 4)")
    assert job.handle(Trained(time_s=0.0, step=2, version=2)) == [], "the run is over"
    assert job.handle(lost(5)) == []


def test_one_that_is_back_with_other_weights_is_a_bug() -> None:
    job = in_training()
    job.handle(lost(0))
    with pytest.raises(AssertionError, match="version=7"):
        job.handle(TrainerReady(time_s=0.0, incarnation=1, version=7))
    with pytest.raises(AssertionError, match="cannot be lost"):
        in_training(max_losses=None).handle(lost(0))


def test_the_log_of_a_run_with_losses_replays() -> None:
    world = world_of(0.2, seed=3, streams=True, engine_loss_rate=0.1, num_engines=2).run()
    assert events_of(world, TrainerLost)
    session = Session(started_at="", time_s=0.0, step=0, job=world.config.to_plain())
    entries = [decode(encode(entry)) for entry in (session, *world.log)]
    assert replay(entries).difference is None


def test_a_config_of_before_has_none() -> None:
    plain = JobConfig(prompts_per_step=1, samples_per_prompt=1, max_steps=1).to_plain()
    assert "max_trainer_losses" not in plain
    assert JobConfig.from_plain(plain).max_trainer_losses is None
