"""Devices that change sides: released to the trainer, and laid out anew for engines of another
degree."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rollpacker.core.commands import (
    NOWHERE,
    Launch,
    Move,
    Place,
    Release,
    Replace,
    Resize,
    RoundKind,
    StartGradients,
    SyncWeights,
    TrainOn,
)
from rollpacker.core.events import (
    Committed,
    EngineLost,
    PromptsFetched,
    RunStarted,
    SampleScored,
    Trained,
    WeightsSynced,
)
from rollpacker.core.fleet.devices import Devices, Owner
from rollpacker.core.fleet.fleet import ZOMBIE, FleetConfig
from rollpacker.core.fleet.parallelism import ParallelismConfig
from rollpacker.core.fleet.stream_plan import DeviceLayout, StreamConfig
from rollpacker.core.job.config import JobConfig
from rollpacker.core.job.job import Job
from rollpacker.core.records import Session, decode, encode
from rollpacker.core.rounds.tail_batching import TailBatchingConfig
from rollpacker.run.replay import replay
from rollpacker.sim.unkind import UnkindConfig
from tests.core.engines import Faults
from tests.core.test_fleet import (
    OFF,
    PROMPTS,
    SAMPLES,
    checked,
    ended,
    lost,
    moved,
    ready,
    trained,
    world_of,
)
from tests.core.world import World, commands_of

KINDS = tuple(kind.value for kind in RoundKind)


def config_of(
    devices: int,
    *,
    degrees: tuple[int, ...] = (1,),
    train_group: int = 1,
    release: bool = True,
    tail: TailBatchingConfig = OFF,
    p0: int = 4,
    **fleet: object,
) -> JobConfig:
    """Engines begin at the first degree; several degrees: a planner that changes them soon."""
    return JobConfig(
        prompts_per_step=p0,
        samples_per_prompt=3,
        max_steps=None,
        tail_batching=tail,
        stream=StreamConfig(enabled=release, kinds=KINDS, min_new_share=0.0),
        parallelism=ParallelismConfig(
            enabled=len(degrees) > 1,
            degrees=tuple(sorted(degrees)),
            initial=degrees[0],
            calm_rounds=1,
        ),
        layouts=tuple(
            DeviceLayout(
                gpus=devices, gpus_per_node=devices, tensor_parallel=degree, train_group=train_group
            )
            for degree in degrees
        ),
        fleet=FleetConfig(
            num_engines=devices // degrees[0],
            num_devices=devices if len(degrees) > 1 else None,
            **{"moves": True} | fleet,  # type: ignore[arg-type]
        ),
    )


@settings(max_examples=80, deadline=None)
@given(
    devices=st.sampled_from((1, 2, 4, 6)),
    degrees=st.sampled_from(((1,), (2,), (1, 2), (2, 1), (1, 2, 4))),
    train_group=st.sampled_from((1, 2)),
    release=st.booleans(),
    routing=st.sampled_from(("spread", "group", "turns")),
    loss_rate=st.sampled_from((0.0, 0.02, 0.1)),
    p0=st.integers(1, 5),
    tail=st.sampled_from((OFF, TailBatchingConfig(prompt_factor=1.5))),
    unkind=st.sampled_from((0.0, 0.2)),
    seed=st.integers(0, 10_000),
)
def test_whoever_has_the_devices_the_same_responses_are_trained_on(
    devices: int,
    degrees: tuple[int, ...],
    train_group: int,
    release: bool,
    routing: str,
    loss_rate: float,
    p0: int,
    tail: TailBatchingConfig,
    unkind: float,
    seed: int,
) -> None:
    fitting = tuple(d for d in degrees if devices % d == 0) or (1,)
    if devices % train_group:
        train_group = 1
    config = config_of(
        devices,
        degrees=fitting,
        train_group=train_group,
        release=release,
        tail=tail,
        p0=p0,
        routing=routing,
    )
    world = World(
        config,
        num_rows=40,
        seed=seed,
        faults=Faults(loss_rate=loss_rate),
        unkind=UnkindConfig(failure_rate=unkind, late_finish_rate=unkind),
        preemption_rate=0.05,
    ).run()
    checked(world)
    assert not world.failed
    if not unkind:
        assert trained(world) == trained(world_of(1, p0=p0, tail=OFF, seed=seed).run())


def test_everything_that_can_happen_to_devices_happens() -> None:
    seen: Counter[object] = Counter()
    for seed in range(12):
        config = config_of(4, degrees=((1, 2), (2, 1), (2,))[seed % 3])
        world = World(
            config, num_rows=40, seed=seed, faults=Faults(loss_rate=0.06), preemption_rate=0.05
        )
        released: set[int] = set()

        def watch(event, handle=world.job.handle, released=released):
            commands = handle(event)
            for command in commands:
                seen[type(command)] += 1
                if isinstance(command, Launch):
                    released.clear()
                    seen["all wait"] += set(command.engines) == {NOWHERE}
                if isinstance(command, Release):
                    released |= {d // world.engines.degree for d in command.devices}  # noqa: B023
                seen["named"] += isinstance(command, StartGradients) and bool(command.devices)
                seen["all"] += isinstance(command, StartGradients) and not command.devices
            if isinstance(event, EngineLost):
                seen["lost while released"] += event.engine in released
                seen["lost beside"] += bool(released) and event.engine not in released
            return commands

        world.job.handle = watch  # type: ignore[method-assign]
        checked(world.run())
        lines = [encode(record) for record in world.log]
        log = [decode(line) for line in lines]
        assert [encode(entry) for entry in log] == lines
        session = Session(started_at="", time_s=0.0, step=0, job=config.to_plain())
        assert replay([session, *log]).difference is None
    for what in (Resize, Release, Move, Place, "named", "lost while released", "lost beside"):
        assert seen[what] > 5, what
    assert seen["all wait"] >= seen[Resize]


def test_a_resumed_run_lays_its_engines_out_as_the_planner_had_them() -> None:
    config = config_of(4, degrees=(2, 1), release=False)
    whole = World(config, num_rows=40).run()
    assert len(commands_of(whole, Resize)) == 1, "nothing preempts: down to 1"
    again = whole.resume_from(5)
    assert [c.version for c in commands_of(again, Resize)] == [5]
    assert trained(again) <= trained(whole)


# -- one event at a time: a release ----------------------------------------------------


def rolling(config: JobConfig) -> tuple[Job, list[object]]:
    """A job in its first round, of four prompts with three samples each, and the last answer."""
    job = Job(config)
    job.handle(RunStarted(time_s=0.0))
    return job, begin(job)


def begin(job: Job) -> list[object]:
    fetched = PromptsFetched(time_s=0.0, prompts=PROMPTS, epoch_ended=False, data_ended=False)
    return list(job.handle(fetched))


def released(devices: int = 3, **settings: object) -> tuple[Job, list[object]]:
    """Three of twelve have ended on three engines: the last engine is released."""
    job, _ = rolling(config_of(devices, **settings))  # type: ignore[arg-type]
    job.handle(ended(SAMPLES[0], 0))
    job.handle(ended(SAMPLES[1], 1))
    return job, list(job.handle(ended(SAMPLES[2], 2)))


def test_samples_of_released_engines_move_to_those_that_stay() -> None:
    job, (_, release, *moves) = released()
    assert release == Release(devices=(2,))
    assert moves == [
        Move(samples=(SAMPLES[5], SAMPLES[11]), engine=0),
        Move(samples=(SAMPLES[8],), engine=1),
    ]
    assert job.handle(moved(SAMPLES[5], 0)) == []
    assert job.handle(ended(SAMPLES[5], 2)) == [] and job.num_late[ZOMBIE] == 1
    assert job.handle(ended(SAMPLES[8], 2)), "it had just finished"
    assert job.fleet is not None
    owners = job.fleet.devices.owners
    assert owners == [Owner("engine", 0), Owner("engine", 1), None]
    for sample in SAMPLES[:2]:
        job.handle(SampleScored(time_s=0.0, sample=sample, value=1.0))
    (start,) = job.handle(SampleScored(time_s=0.0, sample=SAMPLES[2], value=1.0))
    assert start == StartGradients(step=1, groups=(SAMPLES[:3],), devices=(2,))
    assert owners[2] == Owner("replica", 2)


def test_what_was_on_its_way_to_a_released_engine_goes_elsewhere() -> None:
    job, _ = rolling(config_of(2))
    job.handle(lost(1))
    (move,) = job.handle(ready(1))
    assert isinstance(move, Move) and move.engine == 1
    job.handle(ended(SAMPLES[0], 0))
    job.handle(ended(SAMPLES[1], 0))
    commands = job.handle(ended(SAMPLES[2], 0))
    assert commands[1:] == [
        Release(devices=(1,)),
        Move(samples=tuple(reversed(move.samples)), engine=0),
    ]
    assert job.handle(moved(move.samples[0], 1, 1)) == [] and job.num_late[ZOMBIE] == 1
    assert job.handle(ended(move.samples[0], 0))


def test_a_released_engine_takes_nothing_whoever_is_lost() -> None:
    job, _ = released()
    assert job.handle(lost(0)) == [
        Replace(engine=0, incarnation=1, version=0),
        Place(samples=(SAMPLES[3], SAMPLES[6], SAMPLES[9]), engines=(1, 1, 1)),
        Move(samples=(SAMPLES[5], SAMPLES[11]), engine=1),
    ]
    assert job.handle(lost(1)) == [Replace(engine=1, incarnation=1, version=0)]
    assert job.waiting_for().startswith("an engine whose devices were not released to be replaced")
    (place, *_) = job.handle(ready(0))
    assert isinstance(place, Place) and set(place.engines) == {0}
    assert set(place.samples) == set(SAMPLES[3:])


def test_one_that_is_lost_while_it_is_released_is_replaced_for_the_next_round() -> None:
    job, _ = released()
    (place,) = job.handle(lost(2))
    assert isinstance(place, Place) and set(place.samples) == {SAMPLES[5], SAMPLES[8], SAMPLES[11]}
    assert set(place.engines) == {0, 1}
    finish(job, {2: 1})
    launch, replacing = begin(job)
    assert replacing == Replace(engine=2, incarnation=1, version=1)
    assert isinstance(launch, Launch) and set(launch.engines) == {0, 1}


def finish(job: Job, incarnations: dict[int, int]) -> None:
    """The round, and its step."""
    assert job.fleet is not None
    seats = job.fleet._seats
    for sample in list(seats.work):
        number = seats.engine[sample]
        job.handle(ended(sample, number, incarnations.get(number, 0)))
    for sample in SAMPLES:
        job.handle(SampleScored(time_s=0.0, sample=sample, value=1.0))
    step = job.step + 1
    job.handle(Trained(time_s=0.0, step=step, version=step))
    job.handle(WeightsSynced(time_s=0.0, version=step))
    job.handle(Committed(time_s=0.0, step=step))


@pytest.mark.parametrize(
    ("moves", "losses", "why"),
    [(False, 0, "samples under way cannot move"), (True, 1, "an engine was being replaced")],
)
def test_nothing_is_released_that_cannot_move(moves: bool, losses: int, why: str) -> None:
    job, _ = rolling(config_of(3, moves=moves))
    for engine in range(losses):
        job.handle(lost(engine))
    assert job.fleet is not None
    for sample in SAMPLES:
        commands = job.handle(ended(sample, job.fleet._seats.engine[sample]))
        assert not any(isinstance(c, Release) for c in commands)
    for sample in SAMPLES[:-1]:
        job.handle(SampleScored(time_s=0.0, sample=sample, value=1.0))
    (train,) = job.handle(SampleScored(time_s=0.0, sample=SAMPLES[-1], value=1.0))
    assert isinstance(train, TrainOn) and why in train.not_streamed


def test_a_release_at_a_higher_degree_names_whole_engines() -> None:
    job, _ = rolling(config_of(4, degrees=(2,)))
    assert job.fleet is not None
    commands = [c for n in range(3) for c in job.handle(ended(SAMPLES[n], n % 2))]
    assert Release(devices=(2, 3)) in commands
    assert [engine.released for engine in job.fleet.engines] == [False, True]


# -- one event at a time: another degree -----------------------------------------------


def resized() -> tuple[Job, list[object]]:
    """After a round without preemptions on two engines of two devices each."""
    job, _ = rolling(config_of(4, degrees=(2, 1), release=False))
    finish(job, {})
    return job, begin(job)


def test_all_engines_are_laid_out_anew_and_begin_together() -> None:
    job, (resize, launch) = resized()
    assert resize == Resize(tensor_parallel=1, incarnations=(1, 1, 1, 1), version=1)
    assert isinstance(launch, Launch)
    assert launch.tensor_parallel == 1 and set(launch.engines) == {NOWHERE}
    assert job.waiting_for() == "4 of 4 engines to be laid out anew"
    for number in (3, 0, 2):
        assert job.handle(ready(number, 1, version=1)) == []
    (place,) = job.handle(ready(1, 1, version=1))
    assert place == Place(samples=SAMPLES, engines=(0, 1, 2, 3) * 3)


def test_what_was_said_of_engines_before_does_not_count() -> None:
    job, _ = resized()
    assert job.handle(lost(0)) == [] and job.handle(ready(1, 0, version=1)) == []
    assert job.handle(moved(SAMPLES[0], 1)) == [] and job.num_late[ZOMBIE] == 1
    assert job.handle(ended(SAMPLES[0], 1)) == [] and job.num_late[ZOMBIE] == 2
    assert job.fleet is not None and job.fleet.num_ready == 0


def test_one_that_does_not_start_is_not_waited_for() -> None:
    job, _ = resized()
    for number in (0, 1, 3):
        job.handle(ready(number, 1, version=1))
    replacing, place = job.handle(lost(2, 1))
    assert replacing == Replace(engine=2, incarnation=2, version=1)
    assert isinstance(place, Place) and Counter(place.engines) == {0: 4, 1: 4, 3: 4}
    (move,) = job.handle(ready(2, 2, version=1))
    assert isinstance(move, Move) and move.engine == 2


def test_where_none_starts_the_first_replacement_takes_all() -> None:
    job = Job(config_of(2, degrees=(1, 2), release=False, max_losses=9))
    job.handle(RunStarted(time_s=0.0))
    begin(job)
    assert job.fleet is not None
    for sample in SAMPLES:
        event = ended(sample, job.fleet._seats.engine[sample])
        job.handle(replace(event, preemptions=1))
    finish(job, {})
    resize, _ = begin(job)
    assert resize == Resize(tensor_parallel=2, incarnations=(1,), version=1)
    assert job.handle(lost(0, 1)) == [Replace(engine=0, incarnation=2, version=1)]
    assert job.handle(lost(1, 0)) == [], "a slot that is no more"
    assert job.handle(ready(0, 2, version=1)) == [Place(samples=SAMPLES, engines=(0,) * 12)]


def test_bad_numbers_of_devices_are_refused() -> None:
    for devices in (0, 3):
        with pytest.raises(ValueError, match="num_devices must be a multiple of num_engines"):
            FleetConfig(num_engines=2, num_devices=devices)
    assert "num_devices" not in str(config_of(2).to_plain())
    plain = config_of(4, degrees=(2, 1)).to_plain()
    assert JobConfig.from_plain(plain) == config_of(4, degrees=(2, 1))


# -- who has what ----------------------------------------------------------------------


def launch(*engines: int, number: int = 1) -> Launch:
    return Launch(
        round=number,
        kind=RoundKind.PLAIN,
        samples=SAMPLES[: len(engines)],
        version=0,
        tensor_parallel=2,
        engines=engines,
    )


def test_no_device_is_in_two_plans() -> None:
    devices = Devices(2, 2, train_group=2)
    devices.obey(launch(0, 1))
    assert devices.owners == [Owner("engine", n) for n in (0, 0, 1, 1)]
    start = StartGradients(step=1, groups=(SAMPLES[:3],), devices=(2, 3))
    with pytest.raises(AssertionError, match="has it"):
        devices.obey(start)
    devices.obey(Release(devices=(2, 3)))
    assert devices.owners[2:] == [None, None]
    for command in (
        Move(samples=SAMPLES[:1], engine=1),
        Place(samples=SAMPLES[:1], engines=(1,)),
        launch(1),
        Release(devices=(2, 3)),
    ):
        with pytest.raises(AssertionError):
            devices.obey(command)
    devices.obey(start)
    assert devices.owners[2:] == [Owner("replica", 1)] * 2
    devices.obey(TrainOn(step=1, groups=()))
    assert devices.owners == [Owner("replica", n) for n in (0, 0, 1, 1)]
    devices.obey(SyncWeights(version=1))
    devices.obey(Resize(tensor_parallel=1, incarnations=(1, 1, 1, 1), version=1))
    assert devices.owners == [Owner("engine", n) for n in range(4)]


def test_a_trainer_apart_has_none_of_them() -> None:
    devices = Devices(2, 1, trainer_apart=True)
    for command in (StartGradients(step=1, groups=()), TrainOn(step=1, groups=())):
        devices.obey(command)
        assert devices.owners == [Owner("engine", 0), Owner("engine", 1)]
