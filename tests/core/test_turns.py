"""Samples that take turns with environments: by example, and by whole runs in an unkind world."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.core.checks.acting import ActingConfig, TurnLimits
from rollpacker.core.checks.deadlines import AdaptiveDeadlineConfig
from rollpacker.core.checks.reward_schedule import RewardScheduleConfig
from rollpacker.core.checks.schedule import KindConfig
from rollpacker.core.commands import (
    Abort,
    Act,
    CancelAct,
    Conclude,
    Continue,
    Defer,
    Drop,
    Launch,
    LetGo,
    Place,
    Release,
    Score,
    StartGradients,
    TrainOn,
)
from rollpacker.core.events import Acted, PromptsFetched, RunStarted, SampleGenerated
from rollpacker.core.fleet.fleet import FleetConfig
from rollpacker.core.fleet.stream_plan import DeviceLayout, StreamConfig
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.job.config import JobConfig
from rollpacker.core.job.job import Job
from rollpacker.core.records import Session, decode, encode
from rollpacker.core.rounds.round import StrayEventError
from rollpacker.core.rounds.tail_batching import TailBatchingConfig
from rollpacker.run.replay import replay
from rollpacker.sim.unkind import UnkindConfig
from tests.core.engines import Faults
from tests.core.environments import Dialogues
from tests.core.pools import AtRandom
from tests.core.world import World, commands_of, copy_of, events_of, published

DEADLINE = AdaptiveDeadlineConfig(min_s=2.0, factor=2.0, max_s=30.0)
BOUND = {"train": KindConfig(workers=5, deadline=DEADLINE)}
NO_RACE = TailBatchingConfig(enabled=False)


def job_config(
    acting: ActingConfig | None = None, p0: int = 4, r0: int = 3, **settings: object
) -> JobConfig:
    kept = {
        "prompts_per_step": p0,
        "samples_per_prompt": r0,
        "max_steps": None,
        "tail_batching": published(),
        "acting": acting or ActingConfig(),
    }
    return JobConfig(**kept | settings)  # type: ignore[arg-type]


def check_run(world: World) -> World:
    """What holds of every run that is over, beyond what the world's parts assert meanwhile."""
    world.environments.check_end()
    world.job.ledger.check()
    assert not world.job.ledger.open
    trained = [s for c in commands_of(world, TrainOn) for g in c.groups for s in g]
    dropped = [c.prompt for c in commands_of(world, Drop)]
    assert len(set(trained)) == len(trained), "trained on twice"
    prompts = Counter({s.prompt: 1 for s in trained}) + Counter(dropped)
    assert set(prompts.values()) <= {1}, "a prompt is settled twice"
    concluded = [c.sample for c in commands_of(world, Conclude)]
    assert len(set(concluded)) == len(concluded), "a trajectory ends twice"
    assert set(trained) <= set(concluded)
    assert {c.sample for c in commands_of(world, Score)} <= set(concluded)
    aborted = {s for c in commands_of(world, Abort) for s in c.samples}
    lost = {s for s, played in world.environments.played.items() if played.lost}
    assert not lost & (set(concluded) | aborted), "a lost one went on"
    return world


def replayed(world: World) -> None:
    """A log of the run, fed to the core again, brings the same commands."""
    session = Session(started_at="", time_s=0.0, step=0, job=world.config.to_plain())
    lines = [encode(entry) for entry in (session, *world.log)]
    assert replay(map(decode, lines)).difference is None


# -- by example --------------------------------------------------------------------------


def test_a_turn_is_a_message_and_an_answer() -> None:
    world = World(job_config(p0=1, r0=2, tail_batching=NO_RACE), num_rows=1)
    world.dialogues = Dialogues(over_rate=0.4, cut_off_rate=0.0)
    check_run(world.run())
    sample = SampleId(PromptId("train", 0, 0), 0, 0)
    said = [
        (type(c).__name__, getattr(c, "turn", None))
        for record in world.log
        for c in record.commands
        if sample in (getattr(c, "sample", None), *getattr(c, "samples", ()))
        and not isinstance(c, LetGo)
    ]
    turns = world.environments.played[sample].messages
    assert turns > 1
    middle = [("Continue", None), ("Act", 0)] * (turns - 1)
    acts = [("Act", 0), *middle]
    expected = [("Launch", None), *acts, ("Conclude", None), ("Score", None)]
    assert [name for name, _ in said] == [name for name, _ in expected]
    assert [turn for name, turn in said if name == "Act"] == list(range(1, turns + 1))


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (TurnLimits(max_turns=3), "turns"),
        (TurnLimits(max_trajectory_tokens=40), "tokens"),
        (TurnLimits(max_environment_s=5.0), "environment_s"),
    ],
)
def test_each_limit_has_its_own_finish_reason(limits: TurnLimits, reason: str) -> None:
    world = World(job_config(ActingConfig(limits=limits)), num_rows=20)
    world.dialogues = Dialogues(over_rate=0.0, cut_off_rate=0.0)
    check_run(world.run())
    assert {c.reason for c in commands_of(world, Conclude)} == {reason}
    if reason == "turns":  # also the last message is answered
        assert {world.environments.played[c.sample].answered for c in commands_of(world, Conclude)}
        answered = [world.environments.played[c.sample].answered for c in commands_of(world, Score)]
        assert set(answered) == {3}


def test_what_is_cut_off_in_the_middle_of_a_message_is_over_without_an_answer() -> None:
    world = World(job_config(), num_rows=20, dialogues=Dialogues(cut_off_rate=1.0))
    check_run(world.run())
    assert {c.reason for c in commands_of(world, Conclude)} == {"length"}
    assert not commands_of(world, Act) and not commands_of(world, CancelAct)
    limits = TurnLimits(max_trajectory_tokens=1)
    config = job_config(ActingConfig(limits=limits))
    other = World(config, num_rows=20, dialogues=Dialogues(cut_off_rate=1.0)).run()
    assert {c.reason for c in commands_of(other, Conclude)} == {"tokens"}


def test_an_environment_ends_with_its_own_reason() -> None:
    world = World(job_config(), num_rows=20, dialogues=Dialogues(cut_off_rate=0.0))
    check_run(world.run())
    assert {c.reason for c in commands_of(world, Conclude)} == {"done", "no_tool_call"}


def test_where_environments_say_the_prompt_samples_are_launched_after_it() -> None:
    world = World(job_config(ActingConfig(begins=True)), num_rows=20)
    check_run(world.run())
    begun = [c.sample for c in commands_of(world, Act) if c.turn == 0]
    launched = [s for c in commands_of(world, Launch) for s in c.samples]
    assert set(launched) <= set(begun) and len(launched) == len(set(launched))
    assert len(launched) > 20


def test_a_lost_episode_is_played_again_if_its_environment_is_deterministic() -> None:
    unkind = UnkindConfig(act_infrastructure_rate=0.2)
    acting = ActingConfig(is_deterministic=True, max_retries=20)
    world = World(job_config(acting), num_rows=20, unkind=unkind)
    check_run(world.run())
    assert any(c.retry for c in commands_of(world, Act))
    assert not [p for p in world.environments.played.values() if p.lost]


@pytest.mark.parametrize("published_races", [True, False])
def test_a_lost_sample_is_replaced_and_never_judged(published_races: bool) -> None:
    tail = replace(NO_RACE, selection="published", carry=None) if published_races else NO_RACE
    unkind = UnkindConfig(act_failure_rate=0.05, act_infrastructure_rate=0.05, act_hang_rate=0.02)
    config = job_config(ActingConfig(kinds=BOUND), tail_batching=tail, max_retries=6)
    world = check_run(World(config, num_rows=40, unkind=unkind).run())
    lost = {s: played.lost for s, played in world.environments.played.items() if played.lost}
    assert set(lost.values()) == {"environment", "infrastructure", "deadline"}
    assert not lost.keys() & {c.sample for c in commands_of(world, Score)}
    again = [c for c in commands_of(world, Launch) if any(s.index >= 3 for s in c.samples)]
    assert again
    replaced = {s for c in again for s in c.replaces}
    # What raised would raise again with the same noise; what died may not.
    causes = {lost[sample] for sample in replaced}
    assert causes == (set() if published_races else {"infrastructure"})


def test_what_a_lost_process_takes_along_is_tried_again_for_each_place() -> None:
    """No sample of a prompt uses up the tries of another one."""
    config = job_config(tail_batching=NO_RACE)
    world = World(config, num_rows=40, unkind=UnkindConfig(act_infrastructure_rate=0.4))
    world.dialogues = Dialogues(cut_off_rate=0.0, over_rate=1.0)
    check_run(world.run())
    first: dict[SampleId, SampleId] = {}
    for command in commands_of(world, Launch):
        for sample in command.samples:
            before = (command.replaces or (sample,))[0]
            first[sample] = first.get(before, before)
    tries = Counter(first.values())
    assert set(tries.values()) == {1, 2, 3}
    lost = {event.sample for event in events_of(world, Acted) if event.cause}
    last = {place: sample for sample, place in first.items()}
    hopeless = Counter(place.prompt for place, sample in last.items() if sample in lost)
    assert all(tries[place] == 3 for place, sample in last.items() if sample in lost)
    groups = {g[0].prompt: len(g) for c in commands_of(world, TrainOn) for g in c.groups}
    assert all(size == 3 - hopeless[prompt] for prompt, size in groups.items())
    assert max(hopeless.values()) < 3 or world.job.ledger.dropped


def test_an_environment_that_always_raises_drops_with_a_reason_and_ends() -> None:
    world = World(job_config(), num_rows=8, unkind=UnkindConfig(act_failure_rate=1.0))
    world.dialogues = Dialogues(cut_off_rate=0.0)
    check_run(world.run())
    assert not commands_of(world, TrainOn)
    assert world.job.ledger.dropped == {"fewer than two responses": 8}


def test_a_prompt_that_cannot_be_taken_is_not_tried_again() -> None:
    """Each of its samples begins alike: those there are fail, and none takes their places."""
    job = Job(job_config(ActingConfig(begins=True), r0=3, p0=1, tail_batching=NO_RACE))
    job.handle(RunStarted(time_s=0.0))
    prompt = PromptId("train", 0, 0)
    commands = job.handle(PromptsFetched(time_s=0.0, prompts=(prompt,), epoch_ended=False))
    begun = [one.sample for one in commands if isinstance(one, Act)]
    assert [(one.index, one.attempt) for one in begun] == [(0, 0), (1, 0), (2, 0)]
    answers = []
    for sample in begun:
        long = Acted(time_s=1.0, sample=sample, turn=0, cause="prompt", reason="too long")
        answers += job.handle(long)
    assert not [one for one in answers if isinstance(one, Act)]
    assert [one.prompt for one in answers if isinstance(one, Drop)] == [prompt]


def test_hung_environments_hold_up_nobody_beyond_their_deadline() -> None:
    deadline = AdaptiveDeadlineConfig(min_s=2.0, factor=1.5, max_s=30.0)
    acting = ActingConfig(kinds={"train": KindConfig(deadline=deadline)})
    unkind = UnkindConfig(act_hang_rate=0.1)
    world = World(job_config(acting, max_retries=9), num_rows=40, unkind=unkind)
    world.dialogues = Dialogues(slow_rate=0.0, cut_off_rate=0.0)
    check_run(world.run())
    late = [e for e in events_of(world, Acted) if e.cause == "deadline"]
    # Adaptive: after the first answers none is waited for longer than 1.5 times the slowest.
    assert late and all((e.seconds or 0.0) <= 6.0 for e in late[5:])


def test_races_cancel_what_acts_and_abort_what_is_generated() -> None:
    world = World(job_config(p0=8, r0=4), num_rows=200, dialogues=Dialogues(seconds=20.0))
    check_run(world.run())
    cancelled = [s for c in commands_of(world, CancelAct) for s in c.samples]
    aborted = {s for c in commands_of(world, Abort) for s in c.samples}
    assert set(cancelled) - aborted and set(cancelled) & aborted
    assert len(set(cancelled)) == len(cancelled)
    assert commands_of(world, Defer)


def test_so_many_act_at_a_time_and_the_longest_come_first() -> None:
    acting = ActingConfig(kinds={"train": KindConfig(workers=1)})
    config = job_config(acting, p0=2, r0=3, tail_batching=NO_RACE)
    world = World(config, num_rows=8, dialogues=Dialogues(seconds=30.0))
    check_run(world.run())
    free = World(job_config(p0=2, r0=3, tail_batching=NO_RACE), num_rows=8)
    free = check_run(copy_of(free, dialogues=Dialogues(seconds=30.0)).run())
    assert world.time_s > free.time_s


def test_continuing_prefers_the_engine_that_has_what_came_before() -> None:
    config = job_config(p0=8, fleet=FleetConfig(num_engines=3))
    world = check_run(World(config, num_rows=40).run())  # `Engines.continue_` asserts it
    assert {e for c in commands_of(world, Continue) for e in c.engines} == {0, 1, 2}


def test_an_engine_that_is_lost_while_its_samples_act_costs_them_nothing() -> None:
    config = job_config(p0=8, fleet=FleetConfig(num_engines=2, max_losses=3))
    faults = Faults(loss_rate=0.02, zombie_rate=0.5, notice_s=0.0)
    world = World(config, num_rows=120, faults=faults, dialogues=Dialogues(seconds=20.0))
    check_run(world.run())
    assert world.engines.num_losses > 3 and commands_of(world, Place)


def test_the_stream_knows_which_trajectories_have_ended() -> None:
    config = job_config(
        *(None, 8, 4),
        stream=StreamConfig(enabled=True, kinds=("long", "flush"), reward_wait=True),
        layouts=(DeviceLayout(gpus=4, gpus_per_node=4, tensor_parallel=1),),
        fleet=FleetConfig(num_engines=4, moves=True),
    )
    world = check_run(World(config, num_rows=100, dialogues=Dialogues(slow_rate=0.0)).run())
    assert commands_of(world, Release) and commands_of(world, StartGradients)


def test_what_the_driver_must_not_say() -> None:
    job = Job(job_config(p0=1, r0=1, min_verdicts=1, tail_batching=NO_RACE))
    world = World(job.config, num_rows=1)
    world.job = job
    world.begin(RunStarted(time_s=0.0))
    while not any(type(c) is Act for record in world.log for c in record.commands):
        world.advance()
    act = commands_of(world, Act)[0]
    with pytest.raises(StrayEventError, match="turn is with the environment"):
        job.handle(
            SampleGenerated(
                time_s=0.0, sample=act.sample, num_tokens=1, finish_reason="stop", version=0
            )
        )
    with pytest.raises(StrayEventError, match="nobody asked for"):
        other = SampleId(act.sample.prompt, 7, 0)
        job.handle(Acted(time_s=0.0, sample=other, turn=1))
    with pytest.raises(StrayEventError, match="a sample that is needed"):
        job.handle(Acted(time_s=0.0, sample=act.sample, turn=act.turn + 1))


def test_messages_of_a_deadline_name_who_is_waited_for() -> None:
    config = job_config(p0=1, r0=2, tail_batching=NO_RACE)
    world = World(config, num_rows=1, unkind=UnkindConfig(act_hang_rate=1.0))
    world.dialogues = Dialogues(cut_off_rate=0.0)
    with pytest.raises(AssertionError, match=r"waiting for 2 answers \(.*\) from the environments"):
        world.run()


def test_limits_that_make_no_sense() -> None:
    for wrong in ({"max_turns": 0}, {"max_trajectory_tokens": 0}, {"max_environment_s": 0.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            TurnLimits(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_retries"):
        ActingConfig(max_retries=-1)


def test_a_run_without_turns_says_nothing_of_them() -> None:
    config = job_config()
    assert "acting" in config.to_plain()
    assert "acting" not in replace(config, acting=None).to_plain()
    assert JobConfig.from_plain(config.to_plain()) == config


def test_a_resumed_run_remembers_its_deadlines_and_ends_alike() -> None:
    acting = ActingConfig(kinds=BOUND)
    world = World(job_config(acting, tail_batching=NO_RACE), num_rows=24)
    world.dialogues = Dialogues(slow_rate=0.0)
    check_run(world.run())
    resumed = world.resume_from(3)
    again = [c for c in commands_of(world, TrainOn) if c.step > 3]
    assert commands_of(resumed, TrainOn) == again
    first = commands_of(resumed, Act)[0]
    assert first in commands_of(world, Act) and first.timeout_s != DEADLINE.max_s


# -- by property -------------------------------------------------------------------------

LIMITS = st.builds(
    TurnLimits,
    max_turns=st.sampled_from([None, 1, 4]),
    max_trajectory_tokens=st.sampled_from([None, 30]),
    max_environment_s=st.sampled_from([None, 10.0]),
)
ACTING = st.builds(
    ActingConfig,
    limits=LIMITS,
    begins=st.booleans(),
    is_deterministic=st.booleans(),
    order=st.sampled_from(["fifo", "closest", "longest"]),
    max_retries=st.integers(0, 2),
    kinds=st.fixed_dictionaries(
        {
            "train": st.builds(
                KindConfig, workers=st.sampled_from([None, 1, 6]), deadline=st.just(DEADLINE)
            )
        }
    ),
)
UNKIND = st.builds(
    UnkindConfig,
    failure_rate=st.sampled_from([0.0, 0.1]),
    late_finish_rate=st.sampled_from([0.0, 0.5]),
    no_verdict_rate=st.sampled_from([0.0, 0.1]),
    verdict_delay_s=st.sampled_from([0.0, 20.0]),
    act_failure_rate=st.sampled_from([0.0, 0.1]),
    act_hang_rate=st.sampled_from([0.0, 0.1]),
    act_infrastructure_rate=st.sampled_from([0.0, 0.2]),
)
TAILS = st.sampled_from(
    [
        NO_RACE,
        published(),
        published(race="scored"),
        TailBatchingConfig(),
        TailBatchingConfig(stragglers="pool", prompt_factor=2.0),
    ]
)


@settings(max_examples=120, deadline=None)
@given(
    acting=ACTING,
    unkind=UNKIND,
    tail=TAILS,
    overlap=st.booleans(),
    engines=st.sampled_from([None, 1, 3]),
    faulty=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_every_trajectory_ends_once_and_every_prompt_is_settled_once(
    acting: ActingConfig,
    unkind: UnkindConfig,
    tail: TailBatchingConfig,
    overlap: bool,
    engines: int | None,
    faulty: bool,
    seed: int,
) -> None:
    fleet = None if engines is None else FleetConfig(num_engines=engines, moves=faulty)
    config = job_config(
        *(acting, 3, 2),
        tail_batching=tail,
        rewards=RewardScheduleConfig(overlap=overlap),
        fleet=fleet,
        max_retries=3,
    )
    faults = Faults(loss_rate=0.02) if faulty and fleet is not None else None
    world = World(config, num_rows=25, seed=seed, unkind=unkind, faults=faults)
    world.run()
    if not world.failed:
        check_run(world)
    replayed(world)


@settings(max_examples=30, deadline=None)
@given(acting=ACTING, unkind=UNKIND, seed=st.integers(0, 10**6))
def test_the_same_where_pools_are_shared(
    acting: ActingConfig, unkind: UnkindConfig, seed: int
) -> None:
    config = job_config(acting, 3, 2, shares_pools=True, max_retries=3)
    world = World(config, num_rows=25, seed=seed, unkind=unkind, broker=AtRandom(seed))
    world.run()
    if not world.failed:
        check_run(world)


@settings(max_examples=40, deadline=None)
@given(
    acting=ACTING, unkind=UNKIND, apart=st.booleans(), moves=st.booleans(),
    seed=st.integers(0, 10**6),
)  # fmt: skip
def test_gradients_may_begin_before_the_last_trajectory_ends(
    acting: ActingConfig, unkind: UnkindConfig, apart: bool, moves: bool, seed: int
) -> None:
    stream = StreamConfig(enabled=True, kinds=("short", "long"), reward_wait=True)
    config = job_config(
        *(acting, 4, 3),
        stream=stream,
        trainer_apart=apart,
        layouts=(DeviceLayout(gpus=4, gpus_per_node=4, tensor_parallel=1),),
        fleet=FleetConfig(num_engines=4, moves=moves),
        max_retries=3,
    )
    world = World(config, num_rows=40, seed=seed, unkind=unkind)
    world.run()
    if not world.failed:
        check_run(world)
