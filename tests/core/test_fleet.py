"""Many engines: where samples run, and what becomes of them when an engine is lost."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.core.checks.acting import ActingConfig
from rollpacker.core.commands import (
    NOWHERE,
    Abort,
    Commit,
    Defer,
    Drop,
    FetchPrompts,
    Finish,
    Launch,
    Move,
    Place,
    Replace,
    RoundKind,
    TrainOn,
)
from rollpacker.core.events import (
    Committed,
    EngineLost,
    EngineReady,
    PromptsFetched,
    RunStarted,
    SampleGenerated,
    SampleMoved,
    SampleScored,
    Trained,
    WeightsSynced,
)
from rollpacker.core.fleet.fleet import ZOMBIE, Fleet, FleetConfig
from rollpacker.core.fleet.routing import OVERLOAD
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.job.config import JobConfig
from rollpacker.core.job.job import Job
from rollpacker.core.job.phases import Phase
from rollpacker.core.records import Record, Session, decode, encode
from rollpacker.core.rounds.round import StrayEventError
from rollpacker.core.rounds.tail_batching import TailBatchingConfig
from rollpacker.run.replay import replay
from rollpacker.sim.unkind import UnkindConfig
from tests.core.engines import Faults
from tests.core.fleet_checker import Checker
from tests.core.world import World, commands_of, events_of, published

OFF = TailBatchingConfig(enabled=False)


def config_of(
    num_engines: int,
    *,
    p0: int = 4,
    r0: int = 3,
    tail: TailBatchingConfig | None = None,
    **fleet: object,
) -> JobConfig:
    return JobConfig(
        prompts_per_step=p0,
        samples_per_prompt=r0,
        max_steps=None,
        tail_batching=tail or TailBatchingConfig(),
        fleet=FleetConfig(num_engines=num_engines, **fleet),  # type: ignore[arg-type]
    )


def world_of(num_engines: int, loss_rate: float = 0.0, **settings: object) -> World:
    """`settings`: of the configuration, of the world, or of the faults."""
    of_world = ("num_rows", "epochs", "seed", "unkind")
    of_faults = ("most", "most_between_commits", "stillborn_rate", "notice_s")
    world = {name: settings.pop(name) for name in of_world if name in settings}
    faults = {name: settings.pop(name) for name in of_faults if name in settings}
    return World(
        config_of(num_engines, **settings),  # type: ignore[arg-type]
        **{"num_rows": 40} | world,  # type: ignore[arg-type]
        faults=Faults(loss_rate=loss_rate, **faults),  # type: ignore[arg-type]
    )


# -- whole runs: what must hold whatever goes wrong ------------------------------------


def checked(world: World) -> Checker:
    """Everything that holds of a run that came to its end."""
    assert world.config.fleet is not None
    checker = Checker(world.config.fleet.num_engines)
    checker.read(world.log)
    assert not checker.where
    launched = [s for c in commands_of(world, Launch) for s in c.samples]
    assert len(set(launched)) == len(launched), "launched twice"
    assert set(checker.num_ends.values()) == {1} and set(checker.num_ends) == set(launched)
    assert world.job.num_late[ZOMBIE] == checker.num_zombies
    assert sum(checker.rounds.values()) - len(checker.rounds) <= checker.num_failed
    fetched = [prompt for event in events_of(world, PromptsFetched) for prompt in event.prompts]
    settled = [g[0].prompt for c in commands_of(world, TrainOn) for g in c.groups]
    settled += [c.prompt for c in commands_of(world, Drop)]
    assert len(set(settled)) == len(settled) and set(settled) <= set(fetched)
    assert world.failed or set(settled) == set(fetched)
    return checker


def trained(world: World) -> Counter[tuple[PromptId, int, int]]:
    """Every response that was trained on: prompt, index, tokens."""
    lengths = {e.sample: e.num_tokens for e in events_of(world, SampleGenerated)}
    return Counter(
        (sample.prompt, sample.index, lengths[sample])
        for command in commands_of(world, TrainOn)
        for group in command.groups
        for sample in group
    )


@settings(max_examples=60, deadline=None)
@given(
    num_engines=st.integers(1, 5),
    routing=st.sampled_from(("spread", "group", "turns")),
    moves=st.booleans(),
    loss_rate=st.sampled_from((0.01, 0.05, 0.2)),
    p0=st.integers(1, 5),
    factor=st.sampled_from((1.25, 2.0)),
    stragglers=st.sampled_from(("queue", "pool")),
    carry=st.sampled_from(("none", "exact")),
    late_finish_rate=st.sampled_from((0.0, 0.5)),
    seed=st.integers(0, 10_000),
)
def test_whatever_is_lost_the_same_responses_are_trained_on(
    num_engines: int,
    routing: str,
    moves: bool,
    loss_rate: float,
    p0: int,
    factor: float,
    stragglers: str,
    carry: str,
    late_finish_rate: float,
    seed: int,
) -> None:
    tail = TailBatchingConfig(
        prompt_factor=factor,
        stragglers=stragglers,  # type: ignore[arg-type]
        carry=carry,  # type: ignore[arg-type]
    )
    world = world_of(
        *(num_engines, loss_rate),
        **{"p0": p0, "tail": tail, "routing": routing, "moves": moves, "seed": seed},
        unkind=UnkindConfig(late_finish_rate=late_finish_rate),
    ).run()
    checked(world)
    assert not world.failed
    if not late_finish_rate:  # which makes responses longer than they are
        assert trained(world) == trained(world_of(1, p0=p0, tail=OFF, seed=seed).run())


@settings(max_examples=30, deadline=None)
@given(
    num_engines=st.integers(1, 4),
    seed=st.integers(0, 10_000),
    failure_rate=st.sampled_from((0.1, 0.6)),
    no_verdict_rate=st.sampled_from((0.0, 0.5)),
    tail=st.sampled_from((OFF, published(race="scored"), published(race="generated"))),
)
def test_losses_and_failures_together(
    num_engines: int,
    seed: int,
    failure_rate: float,
    no_verdict_rate: float,
    tail: TailBatchingConfig,
) -> None:
    unkind = UnkindConfig(
        failure_rate=failure_rate,
        no_verdict_rate=no_verdict_rate,
        late_finish_rate=0.3,
        verdict_delay_s=20.0,
    )
    world = world_of(num_engines, 0.05, seed=seed, unkind=unkind, moves=True, tail=tail)
    checked(world.run())


def test_losses_come_at_any_moment_and_nothing_is_launched_for_them() -> None:
    at: Counter[Phase] = Counter()
    seen: Counter[type] = Counter()
    for seed in range(30):
        world = world_of(1 + seed % 3, 0.1, seed=seed, moves=True)
        handle = world.job.handle

        def watch(event, handle=handle, job=world.job):
            if isinstance(event, EngineLost):
                at[job.phase] += 1
            return handle(event)

        world.job.handle = watch  # type: ignore[method-assign]
        checker = checked(world.run())
        assert set(checker.rounds.values()) == {1}
        seen.update(type(c) for r in world.log for c in r.commands)
        seen.update(type(r.event) for r in world.log)
        seen[str] += checker.num_zombies
        again = commands_of(world, Replace)
        seen[list] += len(again) - len({(c.engine, c.incarnation) for c in again})
    wanted = {Phase.ROLLING, Phase.TRAINING, Phase.SYNCING, Phase.COMMITTING, Phase.FETCHING}
    assert wanted <= set(at)
    for kind in (Place, Move, Replace, SampleMoved, EngineReady, str):
        assert seen[kind] > 30, kind
    assert seen[list], "a replacement came up with older weights"


def test_a_log_with_losses_is_read_back_and_replays() -> None:
    world = world_of(3, 0.1, seed=2, moves=True).run()
    lines = [encode(record) for record in world.log]
    assert events_of(world, EngineLost) and commands_of(world, Move)
    session = Session(started_at="", time_s=0.0, step=0, job=world.config.to_plain())
    log = [session, *(decode(line) for line in lines)]
    assert [encode(entry) for entry in log[1:]] == lines
    result = replay(log)
    assert result.difference is None and result.num_steps == world.job.step > 5


def test_runs_of_one_engine_say_nothing_new() -> None:
    tail = TailBatchingConfig(prompt_factor=2.0)
    one = world_of(1, tail=tail).run()
    none = World(JobConfig(prompts_per_step=4, samples_per_prompt=3, max_steps=None,
                           tail_batching=tail), num_rows=40).run()  # fmt: skip
    assert [encode(record) for record in one.log] == [encode(record) for record in none.log]
    assert "fleet" not in none.config.to_plain() and "fleet" not in none.snapshots[3][0]


def test_a_resumed_run_goes_on_where_it_was() -> None:
    tail = TailBatchingConfig(prompt_factor=1.5, stragglers="pool")
    whole = world_of(3, tail=tail, seed=4).run()
    for step in sorted(whole.snapshots)[::3]:
        again = whole.resume_from(step)
        assert commands_of(again, Launch) == [
            c for c in commands_of(whole, Launch) if c.version >= step
        ]
    assert any(c.carried for c in commands_of(whole, Launch))


# -- giving up -------------------------------------------------------------------------


def test_three_losses_without_a_commit_end_the_run() -> None:
    world = world_of(3, 0.3, most_between_commits=9, seed=1).run()
    assert world.failed and world.finished is not None
    last = world.log[-1]
    assert isinstance(last.event, EngineLost) and [type(c) for c in last.commands] == [Finish]
    number = last.event.engine
    message = f"engine {number} was lost 3 times without a committed step between them (engine "
    assert world.finished.startswith(message) and world.finished.count(f"engine {number}: ") == 3
    events = [r.event for r in world.log if isinstance(r.event, EngineLost | Committed)]
    commits = [place for place, event in enumerate(events) if isinstance(event, Committed)]
    since = [e.engine for e in events[max(commits, default=-1) + 1 :] if isinstance(e, EngineLost)]
    assert since.count(number) == 3 and max(map(since.count, since)) == 3 < len(since)


def test_older_logs_count_the_losses_of_all_engines() -> None:
    plain = config_of(2).to_plain()
    assert plain["fleet"].pop("losses_of_all") is False
    job = Job(JobConfig.from_plain(plain))
    job.handle(RunStarted(time_s=0.0))
    for event in (lost(0), lost(1)):
        job.handle(event)
    (finish,) = job.handle(lost(0, 1))
    assert isinstance(finish, Finish)
    assert finish.reason.startswith("3 engines were lost without a committed step between them")


def test_a_commit_between_them_is_enough() -> None:
    world = world_of(2, 0.2, most=100).run()
    assert len(events_of(world, EngineLost)) > 6 and not world.failed
    patient = world_of(1, 0.3, most_between_commits=9, most=20, max_losses=10, seed=1).run()
    assert not patient.failed and len(events_of(patient, EngineLost)) > 6


def test_after_giving_up_nothing_is_heard() -> None:
    job = rolling(2, max_losses=1)
    (finish,) = job.handle(lost(1))
    assert isinstance(finish, Finish) and finish.failed and "engine 1: gone" in finish.reason
    assert job.phase is Phase.DONE
    trained = Trained(time_s=0.0, step=9, version=9)
    for event in (ended(SAMPLES[0], 0), ended(SAMPLES[0], 0), lost(0), trained):
        assert job.handle(event) == []
    assert not job.num_late


def test_an_engine_that_is_lost_after_the_end_is_not_replaced() -> None:
    world = world_of(2).run()
    assert world.job.handle(lost(1)) == [] and world.job.phase is Phase.DONE


# -- one event at a time ---------------------------------------------------------------

PROMPTS = tuple(PromptId("train", 0, row) for row in range(4))
SAMPLES = tuple(SampleId(prompt, index, 0) for prompt in PROMPTS for index in range(3))


def rolling(num_engines: int, **settings: object) -> Job:
    """A job in its first round, of four prompts with three samples each, which waits for all."""
    job = Job(config_of(num_engines, tail=OFF, **settings))  # type: ignore[arg-type]
    job.handle(RunStarted(time_s=0.0))
    begin(job)
    return job


def begin(job: Job) -> Launch:
    fetched = PromptsFetched(time_s=0.0, prompts=PROMPTS, epoch_ended=False, data_ended=False)
    (launch,) = job.handle(fetched)
    assert isinstance(launch, Launch)
    return launch


def ended(sample: SampleId, engine: int, incarnation: int = 0, tokens: int = 5) -> SampleGenerated:
    return SampleGenerated(
        time_s=0.0,
        sample=sample,
        num_tokens=tokens,
        finish_reason="stop",
        version=0,
        engine=engine,
        incarnation=incarnation,
    )


def lost(engine: int, incarnation: int = 0) -> EngineLost:
    return EngineLost(time_s=0.0, engine=engine, incarnation=incarnation, reason="gone")


def ready(engine: int, incarnation: int = 1, version: int = 0) -> EngineReady:
    return EngineReady(time_s=0.0, engine=engine, incarnation=incarnation, version=version)


def moved(sample: SampleId, engine: int, incarnation: int = 0) -> SampleMoved:
    return SampleMoved(
        time_s=0.0, sample=sample, engine=engine, incarnation=incarnation, num_tokens=3
    )


def test_samples_of_a_lost_engine_start_again_elsewhere() -> None:
    job = rolling(3)
    assert job.handle(lost(1)) == [
        Replace(engine=1, incarnation=1, version=0),
        Place(samples=SAMPLES[1::3], engines=(0, 2, 0, 2)),
    ]
    assert job.handle(lost(1)) == [], "heard before"
    assert job.handle(ended(SAMPLES[1], 1)) == [] and job.num_late[ZOMBIE] == 1
    assert job.handle(ended(SAMPLES[4], 0)) == [] and job.num_late[ZOMBIE] == 2, "engine 2 has it"
    assert [c.sample for c in job.handle(ended(SAMPLES[4], 2))] == [SAMPLES[4]]
    assert job.handle(ended(SAMPLES[4], 1)) == [] and job.num_late[ZOMBIE] == 3
    with pytest.raises(StrayEventError, match="ended twice"):
        job.handle(ended(SAMPLES[4], 2))
    assert job.handle(ready(1)) == []


def test_what_lost_samples_had_been_given_they_start_from() -> None:
    world = world_of(2, 0.1, tail=TailBatchingConfig(prompt_factor=2.0), seed=5, num_rows=80).run()
    carried = {
        s: n
        for c in commands_of(world, Launch)
        for s, n in zip(c.samples, c.carried or (0,) * len(c.samples), strict=True)
    }
    placed = [s for c in commands_of(world, Place) for s in c.samples]
    assert any(carried[sample] for sample in placed)
    ends = {e.sample: e for e in events_of(world, SampleGenerated)}
    assert all(ends[s].num_kept == (carried[s] or None) for s in placed if s in ends)


def test_the_only_engine_is_waited_for() -> None:
    job = rolling(1)
    assert job.handle(lost(0)) == [Replace(engine=0, incarnation=1, version=0)]
    assert job.waiting_for() == "the only engine to be replaced (engine 0: gone)"
    assert job.handle(ready(0)) == [Place(samples=SAMPLES, engines=(0,) * 12)]
    assert job.waiting_for().startswith("12 responses")
    for sample in SAMPLES:
        job.handle(ended(sample, 0, 1))
    assert job.waiting_for().startswith("12 verdicts")


def test_a_replacement_may_be_lost_too() -> None:
    job = rolling(2)
    job.handle(lost(0))
    assert job.handle(lost(0, 1)) == [Replace(engine=0, incarnation=2, version=0)]
    assert job.handle(ready(0, 1)) == [] and job.fleet is not None and job.fleet.num_ready == 1
    job.handle(ready(0, 2))
    assert job.fleet.num_ready == 2


def test_a_round_may_begin_with_nobody_there() -> None:
    job = Job(config_of(2, tail=OFF))
    job.handle(RunStarted(time_s=0.0))
    job.handle(lost(0))
    job.handle(lost(1))
    launch = begin(job)
    assert launch.engines == (NOWHERE,) * 12
    assert job.waiting_for().startswith("any of the 2 engines, all lost, to be replaced")
    assert job.handle(ready(1)) == [Place(samples=SAMPLES, engines=(1,) * 12)]


def raced(tail: TailBatchingConfig) -> tuple[Job, tuple[SampleId, ...]]:
    """A round of two prompts with two samples each that is over with the first prompt, whose first
    sample has been generated."""
    job = Job(config_of(1, p0=1, r0=2, tail=tail))
    job.handle(RunStarted(time_s=0.0))
    fetched = PromptsFetched(time_s=0.0, prompts=PROMPTS[:2], epoch_ended=False, data_ended=False)
    (launch,) = job.handle(fetched)
    assert isinstance(launch, Launch) and len(launch.samples) == 4
    job.handle(ended(launch.samples[0], 0))
    return job, launch.samples


def test_who_was_told_to_stop_by_an_engine_that_is_lost_has_stopped() -> None:
    job, samples = raced(TailBatchingConfig(prompt_factor=2.0))
    assert Abort(samples=samples[2:]) in job.handle(ended(samples[1], 0))
    for sample in samples[:2]:
        assert job.handle(SampleScored(time_s=0.0, sample=sample, value=1.0)) == []
    assert [type(c) for c in job.handle(lost(0))] == [Replace, TrainOn]


def test_who_waits_for_an_engine_and_is_told_to_stop_has_stopped() -> None:
    job, samples = raced(published(prompt_factor=2.0, sample_factor=1.0, race="scored"))
    job.handle(ended(samples[1], 0))
    assert [type(c) for c in job.handle(lost(0))] == [Replace]
    assert job.handle(SampleScored(time_s=0.0, sample=samples[0], value=1.0)) == []
    commands = job.handle(SampleScored(time_s=0.0, sample=samples[1], value=1.0))
    assert [type(c) for c in commands] == [Abort, Defer, TrainOn]


def test_an_engine_that_comes_up_with_older_weights_takes_the_new_ones() -> None:
    job = rolling(2)
    for sample in SAMPLES:
        job.handle(ended(sample, SAMPLES.index(sample) % 2))
        job.handle(SampleScored(time_s=0.0, sample=sample, value=1.0))
    assert job.phase is Phase.TRAINING
    assert job.handle(lost(0)) == [Replace(engine=0, incarnation=1, version=0)]
    job.handle(Trained(time_s=0.0, step=1, version=1))
    assert job.handle(ready(0)) == [Replace(engine=0, incarnation=1, version=1)]
    job.handle(WeightsSynced(time_s=0.0, version=1))
    job.handle(Committed(time_s=0.0, step=1))
    assert set(begin(job).engines) == {1}
    job.handle(ready(0, 1, version=1))
    with pytest.raises(AssertionError):
        job.handle(lost(1))
        job.handle(ready(1, 1, version=2))


def test_a_run_that_tells_no_engines_apart_hears_of_none() -> None:
    job = Job(JobConfig(prompts_per_step=1, samples_per_prompt=1, max_steps=1))
    with pytest.raises(AssertionError, match="not told apart"):
        job.handle(lost(0))


# -- moving ----------------------------------------------------------------------------


def joined() -> tuple[Job, Move]:
    """A round whose samples are all on engine 0, when engine 1 joins."""
    job = rolling(2, moves=True)
    job.handle(lost(1))
    ((move),) = job.handle(ready(1))
    assert isinstance(move, Move)
    return job, move


def test_an_engine_that_joins_is_given_its_share() -> None:
    job, move = joined()
    assert move == Move(samples=SAMPLES[:5:-1], engine=1)
    gone, *rest = move.samples
    assert job.handle(ended(gone, 0)), "it had just finished"
    assert not job.handle(moved(gone, 1, 1)) and job.num_late[ZOMBIE] == 1
    for sample in rest:
        assert job.handle(moved(sample, 1, 1)) == []
    assert job.handle(ended(rest[0], 0)) == [] and job.num_late[ZOMBIE] == 2
    assert job.handle(ended(rest[0], 1, 1))
    quiet = rolling(2)
    quiet.handle(lost(1))
    assert quiet.handle(ready(1)) == []


def test_where_a_move_comes_from_is_lost_the_sample_starts_again() -> None:
    job, move = joined()
    there, other = move.samples[:2]
    job.handle(moved(there, 1, 1))
    replace, place = job.handle(lost(0))
    assert isinstance(replace, Replace) and isinstance(place, Place)
    assert set(place.samples) == set(SAMPLES) - {there} and set(place.engines) == {1}
    assert job.handle(moved(other, 1, 1)) == [] and job.num_late[ZOMBIE] == 1
    assert job.handle(ended(other, 1, 1))


def test_where_a_move_goes_to_is_lost_the_sample_stays() -> None:
    job, move = joined()
    there, other = move.samples[:2]
    job.handle(moved(there, 1, 1))
    assert job.handle(lost(1, 1)) == [
        Replace(engine=1, incarnation=2, version=0),
        Place(samples=(there,), engines=(0,)),
        Move(samples=tuple(reversed(move.samples[1:])), engine=0),
    ]
    assert job.handle(moved(other, 1, 1)) == [] and job.num_late[ZOMBIE] == 1
    assert job.handle(moved(other, 0)) == [] and job.num_late[ZOMBIE] == 1
    assert job.handle(ended(other, 0))
    assert job.handle(ended(move.samples[2], 0)), "it had just finished"


# -- routing ---------------------------------------------------------------------------


def launch_of(
    samples: tuple[SampleId, ...], carried: tuple[int, ...] = (), number: int = 1
) -> Launch:
    return Launch(round=number, kind=RoundKind.SHORT, samples=samples, version=0, carried=carried)


def routed(fleet: Fleet, launch: Launch) -> tuple[int, ...]:
    (directed,) = fleet.direct([launch], lambda event: [])
    assert isinstance(directed, Launch)
    return directed.engines


def groups_of(num_prompts: int, size: int) -> tuple[SampleId, ...]:
    return tuple(
        SampleId(PromptId("train", 0, row), index, 0)
        for row in range(num_prompts)
        for index in range(size)
    )


def test_spread_gives_each_sample_to_the_engine_with_the_least_to_do() -> None:
    fleet = Fleet(FleetConfig(num_engines=3))
    samples = groups_of(2, 4)
    assert routed(fleet, launch_of(samples)) == (0, 1, 2, 0, 1, 2, 0, 1)
    for sample in samples[::3]:
        assert fleet.heeds(ended(sample, 0, tokens=40))
    late = groups_of(3, 4)[8:]
    assert routed(fleet, launch_of(late)) == (0, 0, 0, 2)


def test_carried_tokens_are_less_work_than_new_ones() -> None:
    fleet = Fleet(FleetConfig(num_engines=2))
    first = groups_of(1, 2)
    routed(fleet, launch_of(first))
    for engine, sample in enumerate(first):
        fleet.heeds(ended(sample, engine, tokens=100))
    four = groups_of(1, 4)
    # 300 tokens with 1600 behind it, 100 without: the first is worth three of the others.
    assert routed(fleet, launch_of(four, (1600, 0, 0, 0), number=2)) == (0, 1, 1, 1)
    again = Fleet(FleetConfig(num_engines=2))
    again.known = fleet.known
    assert routed(again, launch_of(four, (1600, 0, 0, 0), number=2)) == (0, 1, 1, 1)


@pytest.mark.parametrize(("by_turn", "engines"), [(True, (0, 1, 1, 0)), (False, (0, 1, 1, 1))])
def test_of_a_carried_trajectory_a_turn_is_the_work(
    by_turn: bool, engines: tuple[int, ...]
) -> None:
    """100 tokens of the 1600 stand in its first turn; in older logs all of them counted there."""
    acting = ActingConfig(work_by_turn=by_turn)
    config = JobConfig(
        prompts_per_step=1,
        samples_per_prompt=4,
        max_steps=None,
        fleet=FleetConfig(num_engines=2),
        acting=acting,
    )
    plain = config.to_plain()
    assert ("work_by_turn" in plain["acting"]) is by_turn
    fleet = Job(JobConfig.from_plain(plain)).fleet
    assert fleet is not None
    first = groups_of(1, 2)
    routed(fleet, launch_of(first))
    for engine, sample in enumerate(first):
        fleet.heeds(ended(sample, engine, tokens=100))
    assert routed(fleet, launch_of(groups_of(1, 4), (1600, 0, 0, 0), number=2)) == engines


@settings(max_examples=50, deadline=None)
@given(
    num_engines=st.integers(1, 8),
    num_prompts=st.integers(1, 20),
    size=st.integers(1, 8),
    routing=st.sampled_from(("spread", "group", "turns")),
)
def test_no_engine_has_much_more_than_the_others(
    num_engines: int, num_prompts: int, size: int, routing: str
) -> None:
    fleet = Fleet(FleetConfig(num_engines=num_engines, routing=routing))  # type: ignore[arg-type]
    samples = groups_of(num_prompts, size)
    engines = routed(fleet, launch_of(samples)) or (0,) * len(samples)
    counts = Counter(engines)
    mean = len(samples) / num_engines
    most = max(OVERLOAD * mean, mean + 1) if routing == "group" else mean + 1
    assert max(counts.values()) <= most
    assert [engine.tokens for engine in fleet.engines] == [counts[n] for n in range(num_engines)]
    for sample, engine in zip(samples, engines, strict=True):
        fleet.heeds(ended(sample, engine))
    assert not any(engine.tokens for engine in fleet.engines)


def test_in_turns_nobody_looks_at_work() -> None:
    fleet = Fleet(FleetConfig(num_engines=3, routing="turns"))
    samples = groups_of(2, 4)
    assert routed(fleet, launch_of(samples, (0, 0, 0, 900) * 2)) == (0, 1, 2, 0, 1, 2, 0, 1)
    for sample in samples[2::3]:
        assert fleet.heeds(ended(sample, 2))
    # One that is launched later goes to the first, as those of every command do.
    assert routed(fleet, launch_of(groups_of(3, 4)[8:])) == (0, 1, 2, 0)


def test_group_keeps_the_samples_of_a_prompt_together() -> None:
    fleet = Fleet(FleetConfig(num_engines=3, routing="group"))
    assert routed(fleet, launch_of(groups_of(6, 4))) == tuple(
        engine for engine in (0, 1, 2, 0, 1, 2) for _ in range(4)
    )
    # A replacement goes where its prompt is, unless that engine has too much to do.
    more = SampleId(PromptId("train", 0, 1), 4, 0)
    assert routed(fleet, launch_of((more,))) == (1,)
    alone = Fleet(FleetConfig(num_engines=4, routing="group"))
    assert Counter(routed(alone, launch_of(groups_of(1, 8)))) == {0: 3, 1: 3, 2: 2}


def test_settings_are_checked() -> None:
    for name in ("num_engines", "max_losses"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1"):
            FleetConfig(**{name: 0})
    plain = config_of(3, routing="group").to_plain()
    assert JobConfig.from_plain(plain) == config_of(3, routing="group")


def test_the_log_leaves_out_what_is_as_before() -> None:
    line = encode(Record(time_s=0.0, event=ended(SAMPLES[0], 0), commands=(), cost_s=0.0))
    assert "engine" not in line and "incarnation" not in line
    assert [type(c) for c in Job(config_of(2)).handle(RunStarted(time_s=0.0))] == [FetchPrompts]
    assert not commands_of(world_of(1).run(), Commit)[0].stopping
