"""Whole runs of the core in virtual time: the rules of tail batching, by example and by
property."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec import structs

from rollpacker.codec import to_plain
from rollpacker.core.checks.deadlines import AdaptiveDeadlineConfig
from rollpacker.core.checks.reward_schedule import RewardKindConfig, RewardScheduleConfig
from rollpacker.core.commands import (
    Abort,
    CancelScore,
    Commit,
    Defer,
    Drop,
    FetchPrompts,
    Finish,
    Launch,
    RoundKind,
    TrainOn,
)
from rollpacker.core.events import (
    Committed,
    PromptsFetched,
    RunStarted,
    SampleAborted,
    SampleGenerated,
    SampleScored,
)
from rollpacker.core.fleet.stream_plan import StreamConfig
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.job.config import JobConfig
from rollpacker.core.job.job import Job
from rollpacker.core.job.phases import Phase, ProtocolError
from rollpacker.core.records import decode, encode
from rollpacker.core.rounds.dynamic_sampling import DynamicSamplingConfig
from rollpacker.core.rounds.round import StrayEventError
from rollpacker.core.rounds.tail_batching import TailBatchingConfig, Tier
from rollpacker.sim.unkind import UnkindConfig
from tests.core.world import World, commands_of, events_of, published


def job_config(p0: int = 4, r0: int = 3, steps: int | None = None, **tail: object) -> JobConfig:
    return JobConfig(
        prompts_per_step=p0,
        samples_per_prompt=r0,
        max_steps=steps,
        tail_batching=published(**tail),  # type: ignore[arg-type]
    )


def kinds(world: World) -> str:
    """The rounds by initial; a replacement launch belongs to its round."""
    rounds = {c.round: c.kind for c in commands_of(world, Launch)}
    return "".join(kind[0] for kind in rounds.values())


def test_published_factors_give_four_short_rounds_and_a_long_one() -> None:
    world = World(job_config(p0=128, r0=8, steps=10), num_rows=10_000).run()
    assert kinds(world) == "sssslssssl"
    short, long = commands_of(world, Launch)[0], commands_of(world, Launch)[4]
    assert len(short.samples) == 160 * 10
    assert len(long.samples) == 128 * 8
    assert all(len(c.groups) == 128 for c in commands_of(world, TrainOn))
    assert all(len(g) == 8 for c in commands_of(world, TrainOn) for g in c.groups)
    assert all(len(c.prompts) == 32 for c in commands_of(world, Defer))


def test_a_long_round_takes_the_queue_in_order_and_aborts_nothing() -> None:
    world = World(job_config(p0=4, r0=2, steps=5), num_rows=1000).run()
    deferred = [prompt for c in commands_of(world, Defer) for prompt in c.prompts]
    long = next(c for c in commands_of(world, Launch) if c.kind is RoundKind.LONG)
    assert [s.prompt for s in long.samples[::2]] == deferred[:4]
    assert {s.attempt for s in long.samples} == {1}
    launched = set(long.samples)
    assert not any(launched & set(c.samples) for c in commands_of(world, Abort))


def test_surplus_samples_are_aborted_the_moment_their_prompt_is_done() -> None:
    world = World(job_config(p0=1, r0=2, steps=1, prompt_factor=2.0, sample_factor=2.0))
    world.length = lambda sample, rng: 10 * (sample.prompt.row + 1) + sample.index
    world.run()
    abort = commands_of(world, Abort)[0]
    assert [str(s) for s in abort.samples] == ["train/0/0#0.2", "train/0/0#0.3"]
    aborted = {str(e.sample): e.num_tokens for e in events_of(world, SampleAborted)}
    assert aborted["train/0/0#0.2"] == 11  # when the second of the prompt finished
    assert aborted["train/0/1#0.0"] == 11


def test_without_tail_batching_everything_launched_is_trained_on() -> None:
    world = World(job_config(p0=4, r0=3, enabled=False), num_rows=10, epochs=2).run()
    assert kinds(world) == "pppppp"  # 4 + 4 + 2 prompts, twice
    assert not commands_of(world, Abort) and not commands_of(world, Defer)
    assert [len(c.groups) for c in commands_of(world, TrainOn)] == [4, 4, 2, 4, 4, 2]


def test_factors_of_one_race_nobody() -> None:
    world = World(job_config(p0=5, r0=2, prompt_factor=1, sample_factor=1), num_rows=10).run()
    assert kinds(world) == "ss"
    assert not commands_of(world, Abort) and not commands_of(world, Defer)


def test_the_end_of_an_epoch_empties_the_queue() -> None:
    world = World(job_config(p0=4, r0=2), num_rows=11, epochs=2).run()
    # 5 launched (1 deferred), 5 launched (2 deferred), 1 left over: a last round of 3
    assert kinds(world) == "ssf" * 2
    assert [len(c.groups) for c in commands_of(world, TrainOn)] == [4, 4, 3] * 2
    assert world.finished == "the data ended"


def test_a_queue_may_span_epochs_and_meet_the_same_row_again() -> None:
    config = job_config(p0=4, r0=2, flush_each_epoch=False)
    world = World(config, num_rows=6, epochs=3, length=lambda s, rng: 1 + 50 * (s.prompt.row == 0))
    world.run()
    waiting = [prompt for c in commands_of(world, Defer) for prompt in c.prompts]
    assert PromptId("train", 0, 0) in waiting and PromptId("train", 1, 0) in waiting
    assert world.job.ledger.num_trained == 18


def test_fewer_prompts_than_a_step_needs() -> None:
    world = World(job_config(p0=8, r0=2), num_rows=3).run()
    assert kinds(world) == "f"
    assert [len(c.groups) for c in commands_of(world, TrainOn)] == [3]


def test_the_end_of_training_empties_the_queue() -> None:
    world = World(job_config(p0=4, r0=2, steps=2), num_rows=1000).run()
    assert kinds(world) == "ssf"
    assert world.finished == "every step is done"
    assert not world.job.ledger.open
    commits = commands_of(world, Commit)
    assert [c.last for c in commits] == [False, False, True]


def test_a_failed_sample_is_replaced() -> None:
    world = World(
        job_config(p0=2, r0=3, steps=3, enabled=False),
        num_rows=100,
        unkind=UnkindConfig(failure_rate=0.2),
    )
    world.run()
    replaced = [s for c in commands_of(world, Launch) for s in c.samples if s.index >= 3]
    assert replaced
    assert sum(len(g) == 3 for c in commands_of(world, TrainOn) for g in c.groups) >= 4


def test_an_engine_that_always_fails_drops_with_a_reason_and_ends() -> None:
    world = World(job_config(p0=2, r0=2), num_rows=4, unkind=UnkindConfig(failure_rate=1.0)).run()
    assert not commands_of(world, TrainOn)
    assert world.job.ledger.dropped == {"fewer than two responses": 4}
    assert world.job.version == 0 and world.job.step == len(commands_of(world, Commit))


def test_a_run_that_never_trains_gives_up() -> None:
    world = World(
        job_config(p0=2, r0=2), num_rows=1000, unkind=UnkindConfig(no_verdict_rate=1.0)
    ).run()
    assert world.job.step == 3
    finish = commands_of(world, Finish)[0]
    assert finish.failed and finish.reason == "3 steps in a row had no group to train on"


def test_a_run_that_gave_up_tries_again_when_it_is_resumed() -> None:
    world = World(
        job_config(p0=2, r0=2), num_rows=1000, unkind=UnkindConfig(no_verdict_rate=1.0)
    ).run()
    world.unkind = UnkindConfig()  # the reward was mended
    resumed = world.resume_from(world.job.step)
    assert not commands_of(resumed, Finish)[0].failed
    assert resumed.job.ledger.num_trained > 900


def test_a_run_given_more_epochs_goes_on() -> None:
    world = World(job_config(p0=4, r0=2), num_rows=8, epochs=1).run()
    state, cursor, _ = world.snapshots[max(world.snapshots)]
    assert cursor == (1, 0)
    job = Job.restore(world.config, state, data_ended=False)
    commands = job.handle(Committed(time_s=0, step=job.step, checkpointed=True))
    assert commands == [FetchPrompts(count=5)]


def test_no_verdict_leaves_a_sample_out_and_a_group_without_two_is_dropped() -> None:
    world = World(
        job_config(p0=4, r0=2), num_rows=40, unkind=UnkindConfig(no_verdict_rate=0.5)
    ).run()
    drops = commands_of(world, Drop)
    assert drops and {d.reason for d in drops} == {"fewer than two verdicts"}
    no_verdict = {e.sample for e in events_of(world, SampleScored) if e.value is None}
    trained = {s for c in commands_of(world, TrainOn) for g in c.groups for s in g}
    assert no_verdict and not no_verdict & trained


def test_a_race_on_verdicts_waits_for_the_reward() -> None:
    config = job_config(p0=2, r0=2, steps=4, race="scored")
    world = World(config, num_rows=100, unkind=UnkindConfig(verdict_delay_s=30.0)).run()
    scored = {e.sample: i for i, e in enumerate(events_of(world, SampleScored))}
    for command in commands_of(world, TrainOn):
        for group in command.groups:
            assert all(sample in scored for sample in group)
    assert commands_of(world, CancelScore)
    assert world.job.num_late["SampleScored"] == 0
    lenient = replace(config, rewards=RewardScheduleConfig(cancel=False))
    world = World(lenient, num_rows=100, unkind=UnkindConfig(verdict_delay_s=30.0)).run()
    assert not commands_of(world, CancelScore)
    assert world.job.num_late["SampleScored"] > 0


def test_a_stop_ends_after_the_step_at_hand_with_a_checkpoint() -> None:
    world = World(job_config(p0=4, r0=2, steps=50), num_rows=1000, stop_at_step=3).run()
    assert world.finished == "asked to stop"
    assert world.job.step == 3
    assert events_of(world, Committed)[-1].checkpointed


def test_events_that_cannot_be_raise() -> None:
    job = Job(job_config(p0=1, r0=2, steps=1))
    assert job.handle(RunStarted(time_s=0)) == [FetchPrompts(count=2)]
    with pytest.raises(ProtocolError):
        job.handle(RunStarted(time_s=0))
    prompts = (PromptId("train", 0, 0), PromptId("train", 0, 1))
    launch = job.handle(PromptsFetched(time_s=0, prompts=prompts, epoch_ended=False))[0]
    assert isinstance(launch, Launch) and len(launch.samples) == 2 * 3
    with pytest.raises(StrayEventError, match="not launched"):
        job.handle(generated(SampleId(PromptId("train", 0, 7), 0, 0)))
    with pytest.raises(StrayEventError, match="version 5"):
        job.handle(generated(launch.samples[0], version=5))
    with pytest.raises(StrayEventError, match="nobody aborted"):
        job.handle(SampleAborted(time_s=0, sample=launch.samples[1], num_tokens=1))
    with pytest.raises(StrayEventError, match="nobody asked for"):
        job.handle(SampleScored(time_s=0, sample=launch.samples[1], value=1.0))


def generated(sample: SampleId, version: int = 0) -> SampleGenerated:
    return SampleGenerated(
        time_s=0, sample=sample, num_tokens=1, finish_reason="stop", version=version
    )


def test_what_it_waits_for_is_said_by_name() -> None:
    job = Job(job_config(p0=1, r0=2, steps=1, enabled=False))
    job.handle(RunStarted(time_s=0))
    prompts = (PromptId("train", 0, 0),)
    launch = job.handle(PromptsFetched(time_s=0, prompts=prompts, epoch_ended=False))[0]
    assert isinstance(launch, Launch)
    job.handle(generated(launch.samples[0]))
    assert job.waiting_for() == "1 response (train/0/0#0.1) from the engine"
    job.handle(generated(launch.samples[1]))
    assert job.waiting_for().startswith("2 verdicts (train/0/0#0.0, train/0/0#0.1)")


def tail_batching(**values: object) -> TailBatchingConfig | None:
    try:
        return published(**values)  # type: ignore[arg-type]
    except ValueError:  # a combination that the config refuses
        return None


def a_config(tail: TailBatchingConfig, overlap: bool, stream: bool, **values: object) -> JobConfig:
    rewards = RewardScheduleConfig(
        overlap=overlap or tail.race == "scored",
        order=values.pop("order"),  # type: ignore[arg-type]
        cancel=values.pop("cancel"),  # type: ignore[arg-type]
        kinds={"train": values.pop("kind")},  # type: ignore[dict-item]
    )
    stream_config = StreamConfig(
        enabled=stream and tail.debias == "none", reward_wait=not values.get("trainer_apart")
    )
    return JobConfig(tail_batching=tail, rewards=rewards, stream=stream_config, **values)  # type: ignore[arg-type]


factors = st.floats(1, 2.5)
tails = st.builds(
    tail_batching,
    enabled=st.booleans(),
    prompt_factor=factors,
    sample_factor=factors,
    tiers=st.lists(st.builds(Tier, prompt_factor=factors, sample_factor=factors), max_size=2).map(
        tuple
    ),
    race=st.sampled_from(["generated", "scored"]),
    balance_sources=st.booleans(),
    debias=st.sampled_from(["none", "none", "moments"]),
    flush_each_epoch=st.booleans(),
) | st.builds(tail_batching, prompt_factor=st.just("auto"), sample_factor=st.just("auto"))
worlds = st.builds(
    World,
    config=st.builds(
        a_config,
        tail=tails.filter(lambda tail: tail is not None),
        overlap=st.booleans(),
        stream=st.booleans(),
        order=st.sampled_from(["fifo", "closest", "longest"]),
        cancel=st.booleans(),
        dynamic_sampling=st.builds(
            DynamicSamplingConfig, enabled=st.booleans(), max_refills=st.integers(0, 3)
        ),
        kind=st.builds(
            RewardKindConfig,
            workers=st.none() | st.integers(1, 3),
            deadline=st.none() | st.just(AdaptiveDeadlineConfig(max_s=50.0)),
        ),
        prompts_per_step=st.integers(1, 6),
        samples_per_prompt=st.integers(2, 4),
        max_steps=st.none() | st.integers(1, 12),
        trainer_apart=st.booleans(),
        min_verdicts=st.integers(1, 2),
    ),
    num_rows=st.integers(1, 25),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 1_000_000),
    unkind=st.builds(
        UnkindConfig,
        failure_rate=st.sampled_from([0.0, 0.1, 0.5]),
        no_verdict_rate=st.sampled_from([0.0, 0.1, 0.6]),
        infrastructure_rate=st.sampled_from([0.0, 0.3]),
        verdict_delay_s=st.sampled_from([0.0, 3.0, 100.0]),
        late_finish_rate=st.sampled_from([0.0, 0.5, 1.0]),
    ),
    sources=st.sampled_from([("train",), ("train", "other"), ("train", "train", "train", "other")]),
)


@settings(max_examples=150, deadline=None)
@given(worlds)
def test_every_prompt_is_trained_once_or_dropped_with_a_reason(world: World) -> None:
    world.run()
    fetched = [p for e in events_of(world, PromptsFetched) for p in e.prompts]
    trained = [g[0].prompt for c in commands_of(world, TrainOn) for g in c.groups]
    dropped = [c.prompt for c in commands_of(world, Drop)]
    given_up = commands_of(world, Finish)[0].failed
    still_open = list(world.job.ledger.open)
    assert Counter(fetched) == Counter(trained + dropped + still_open)
    assert given_up or not still_open
    assert max(Counter(fetched).values()) == 1
    if world.config.max_steps is None and not given_up:
        assert len(fetched) == world.num_rows * world.epochs
    assert all(c.reason for c in commands_of(world, Drop))


@settings(max_examples=100, deadline=None)
@given(worlds)
def test_nothing_leaks_and_nothing_is_off_policy(world: World) -> None:
    world.run()
    assert not world.running
    launched = [s for c in commands_of(world, Launch) for s in c.samples]
    assert max(Counter(launched).values()) == 1
    versions = {s: c.version for c in commands_of(world, Launch) for s in c.samples}
    verdicts = {e.sample: e.value for e in events_of(world, SampleScored)}
    for version, command in enumerate(commands_of(world, TrainOn)):
        for group in command.groups:
            assert world.config.min_verdicts <= len(group) <= world.config.samples_per_prompt
            assert list(group) == sorted(group)
            assert all(versions[s] == version for s in group)
            assert all(verdicts[s] is not None for s in group)
    sizes = [len(c.groups) for c in commands_of(world, TrainOn)]
    assert max(sizes, default=0) <= world.config.prompts_per_step


@settings(max_examples=60, deadline=None)
@given(worlds, st.data())
def test_a_run_restored_at_any_commit_goes_on_as_if_nothing_had_been(
    world: World, data: st.DataObject
) -> None:
    # Checks that are under way die with the process, and with them the order of a race on them.
    assume(world.config.tail_batching.race == "generated" or not world.unkind.verdict_delay_s)
    world.run()
    gave_up = commands_of(world, Finish)[0].failed
    steps = sorted(world.snapshots)
    # The commit at which a run gave up is the exception: resumed there, it tries again.
    step = data.draw(st.sampled_from(steps[:-1] if gave_up else steps))
    resumed = world.resume_from(step)
    expected = [c for c in commands_of(world, TrainOn) if c.step > step]
    assert what_is_trained(commands_of(resumed, TrainOn)) == what_is_trained(expected)
    assert resumed.job.step == world.job.step
    assert to_plain(resumed.job.ledger) == to_plain(world.job.ledger)
    assert resumed.finished == world.finished


def what_is_trained(commands: list[TrainOn]) -> list[TrainOn]:
    """Without how much of it was begun early: that depends on when verdicts came, and checks of
    the round before may have kept a worker busy that is free after a restart."""
    return [structs.replace(c, num_streamed=0, not_streamed="") for c in commands]


@settings(max_examples=40, deadline=None)
@given(worlds)
def test_a_log_replays_to_the_same_commands(world: World) -> None:
    world.run()
    lines = [encode(record) for record in world.log]
    job = Job(world.config)
    for line in lines:
        record = decode(line)
        assert tuple(job.handle(record.event)) == record.commands  # type: ignore[union-attr]
    assert job.phase is Phase.DONE
    assert len(commands_of(world, Finish)) == 1


@settings(max_examples=60, deadline=None)
@given(worlds)
def test_a_short_round_ends_when_its_last_needed_prompt_does(world: World) -> None:
    """Time, not only order: a round lasts exactly as long as its slowest kept sample."""
    world.unkind = UnkindConfig()
    world.config = replace(world.config, dynamic_sampling=DynamicSamplingConfig())
    world.job = Job(world.config)
    world.run()
    launched_at = {
        s: r.time_s
        for r in world.log
        for c in r.commands
        if isinstance(c, Launch)
        for s in c.samples
    }
    ended_at = {r.event.sample: r.time_s for r in world.log if isinstance(r.event, SampleGenerated)}
    for record in world.log:
        for command in record.commands:
            if isinstance(command, TrainOn):
                samples = [s for group in command.groups for s in group]
                slowest = max(ended_at[s] - launched_at[s] for s in samples)
                assert record.time_s - launched_at[samples[0]] == slowest
