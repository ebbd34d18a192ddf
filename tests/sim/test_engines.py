"""Engines of a simulation: where samples go, and what a loss costs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from rollpacker.config.document import ConfigError
from rollpacker.core.commands import (
    Launch,
    Move,
    Place,
    Release,
    Replace,
    Resize,
    StartGradients,
    TrainOn,
)
from rollpacker.core.events import EngineLost, EngineReady, SampleGenerated, SampleMoved
from rollpacker.core.fleet.fleet import ZOMBIE
from rollpacker.core.records import Record, Session
from rollpacker.run.replay import replay
from rollpacker.sim.latency import Calibration
from rollpacker.sim.result import SystemResult
from rollpacker.sim.scenario import Scenario, load_scenario
from rollpacker.sim.simulate import job_config, machine_of, simulate
from rollpacker.sim.simulation import Simulation
from rollpacker.sim.workload import Workload
from tests.core.fleet_checker import Checker
from tests.sim.test_simulation import SMALL

PLAIN = ("parallelism_planner.enabled=false", "stream_trainer.kinds=[]")
LOST = ("unkind.engine_life_s=4000", "unkind.engine_start_s=10")


@pytest.fixture
def make(tmp_path: Path):
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return lambda *overrides: load_scenario(path, [*PLAIN, *overrides])


def run(made: Scenario) -> tuple[Simulation, SystemResult, list[Record]]:
    records: list[Record] = []
    machine = machine_of(made, Calibration())
    simulation = Simulation(
        job_config(made, machine),
        machine,
        Workload(made),
        unkind=made.unkind,
        seed=made.seed,
        observe=records.append,
    )
    return simulation, simulation.run(made.steps), records


@pytest.mark.parametrize("system", ["verl", "rlhfuse", "rollpacker-published"])
def test_fresh_samples_are_spread_as_they_were_dealt(make, system):
    settings = (f"system={system}", "stream_trainer.kinds=[]")
    assert simulate(make(*settings, "rollout.routing=spread")) == simulate(make(*settings))


def test_one_engine_is_not_named(make):
    _, result, records = run(make("rollout.tensor_parallel=8"))
    assert not any(c.engines for c in commands_of(records, Launch))
    assert not any(getattr(r.event, "engine", 0) for r in records)
    assert len(result.steps) == 12


@pytest.mark.parametrize("gpus", [4, 8])
def test_without_a_routing_the_core_deals_in_turn(make, gpus):
    _, _, records = run(make(f"cluster.gpus={gpus}", "unkind.failure_rate=0.02"))
    launches = commands_of(records, Launch)
    for launch in launches:
        assert launch.engines == tuple(n % gpus for n in range(len(launch.samples)))
    assert {len(launch.samples) for launch in launches} > {1}
    ends = [r.event for r in records if isinstance(r.event, SampleGenerated)]
    assert {event.engine for event in ends} == set(range(gpus))


def test_routings_differ(make):
    _, spread, _ = run(make("rollout.routing=spread"))
    _, group, records = run(make("rollout.routing=group"))
    assert spread != group
    launch = next(c for r in records for c in r.commands if isinstance(c, Launch))
    assert set(launch.engines) == set(range(8))
    engines = {}
    for sample, engine in zip(launch.samples, launch.engines, strict=True):
        engines.setdefault(sample.prompt, set()).add(engine)
    assert Counter(map(len, engines.values())).most_common(1)[0][0] == 1


@pytest.mark.parametrize(
    ("system", "routing"),
    [
        ("verl", "spread"),
        ("rollpacker-published", "spread"),
        ("rollpacker", "spread"),
        ("rollpacker", "turns"),
    ],
)
def test_lost_engines_cost_time_and_nothing_else(make, system, routing):
    settings = (f"system={system}", "stream_trainer.kinds=[]", "steps=60")
    settings = (*settings, f"rollout.routing={routing}", "rollout.moves=true")
    seen = Counter()
    for seed in range(3):
        made = make(*settings, *LOST, f"seed={seed}")
        simulation, result, records = run(made)
        seen.update(type(r.event) for r in records)
        seen.update(type(c) for r in records for c in r.commands)
        checker = Checker(8)
        checker.read(records)
        assert checker.num_zombies == simulation.job.num_late[ZOMBIE]
        assert set(checker.num_ends.values()) == {1}
        commands = [c for r in records for c in r.commands if isinstance(c, TrainOn)]
        trained = [group[0].prompt for c in commands for group in c.groups]
        assert len(set(trained)) == len(trained) and len(result.steps) == len(commands) == 60
        session = Session(started_at="", time_s=0.0, step=0, job=simulation.job.config.to_plain())
        assert replay([session, *records]).difference is None
        assert simulate(made) == result, "the same seed brings the same losses"
    assert seen[EngineLost] > 5 and seen[EngineReady] > 5 and seen[Place] > 2 and seen[Replace] > 5


def test_samples_move_to_an_engine_that_has_joined(make):
    settings = ("system=verl", "rollout.routing=spread", "steps=60", *LOST)
    _, moved, records = run(make(*settings, "rollout.moves=true"))
    moves = [s for r in records for c in r.commands if isinstance(c, Move) for s in c.samples]
    answers = [r.event for r in records if isinstance(r.event, SampleMoved)]
    assert len(answers) == len(moves) > 5 and any(event.num_tokens for event in answers)
    ends = {r.event.sample: r.event.engine for r in records if isinstance(r.event, SampleGenerated)}
    assert any(ends[event.sample] == event.engine for event in answers)
    assert simulate(make(*settings, "rollout.moves=false")) != moved


MANY = ("cluster.gpus=8", "rollout.routing=spread", "rollout.moves=true")
RELEASING = (*MANY, "system=rollpacker", "stream_trainer.enabled=true")


def changing(*overrides: str) -> tuple[str, ...]:
    """The planner leaves the degree that it begins with, in short rounds before it does in long
    ones."""
    settings = ("parallelism_planner.enabled=true", "rollout.tensor_parallel=4", "steps=30")
    return (*MANY, *settings, *overrides)


def commands_of(records: list[Record], kind: type) -> list:
    return [c for r in records for c in r.commands if isinstance(c, kind)]


@pytest.mark.parametrize("losses", [(), LOST])
def test_samples_of_released_engines_move_by_the_cores_command(make, losses):
    kinds = 'stream_trainer.kinds=["long","flush","plain","short"]'
    made = make(*RELEASING, kinds, "steps=40", *losses)
    simulation, result, records = run(made)
    releases, moves = commands_of(records, Release), commands_of(records, Move)
    assert result.num_releases == len(releases) > 5 and len(moves) > 5
    assert any(c.devices for c in commands_of(records, StartGradients))
    assert result.bubble["migration"] > 0
    checker = Checker(8)
    checker.read(records)
    assert set(checker.num_ends.values()) == {1}
    session = Session(started_at="", time_s=0.0, step=0, job=simulation.job.config.to_plain())
    assert replay([session, *records]).difference is None


def test_a_release_is_worth_as_much_as_one_in_turn(make):
    settings = ('stream_trainer.kinds=["short"]', "stream_trainer.enabled=true", "steps=40")
    in_turn = simulate(make("system=rollpacker", *settings))
    spread = simulate(make(*RELEASING, *settings))
    assert spread.num_releases == in_turn.num_releases > 3
    assert spread.device_seconds == pytest.approx(in_turn.device_seconds, rel=0.02)


def test_what_moves_at_a_release_is_dealt_in_turn_engine_by_engine(make):
    _, _, records = run(make("system=rlhfuse", 'stream_trainer.kinds=["plain"]', "rewards=[]"))
    engines, num_shared = {}, 0
    for record in records:
        for command in record.commands:
            if isinstance(command, Launch):
                engines = dict(zip(command.samples, command.engines, strict=True))
        if not any(isinstance(c, Release) for c in record.commands):
            engines.pop(getattr(record.event, "sample", None), None)
            continue
        del engines[record.event.sample]
        moves = {c.engine: c.samples for c in record.commands if isinstance(c, Move)}
        leaving = sorted((s for s in engines if engines[s] >= 4), key=engines.__getitem__)
        dealt = {turn: tuple(leaving[turn::4]) for turn in range(4)}
        assert moves == {turn: samples for turn, samples in dealt.items() if samples}
        num_shared += len({engines[s] for s in leaving}) > 1
    assert num_shared > 3


def test_engines_of_another_degree_take_time_to_come(make):
    totals = []
    for seconds in (0, 40):
        made = make(*changing(f"parallelism_planner.resize_s={seconds}"))
        simulation, result, records = run(made)
        resizes = commands_of(records, Resize)
        assert len(resizes) > 1
        checker = Checker(8 // made.rollout.tensor_parallel)
        checker.degree = made.rollout.tensor_parallel
        checker.read(records)
        assert set(checker.num_ends.values()) == {1}
        assert {step.tensor_parallel for step in result.steps} >= {4, 2}
        session = Session(started_at="", time_s=0.0, step=0, job=simulation.job.config.to_plain())
        assert replay([session, *records]).difference is None
        totals.append(result.device_seconds - 8 * seconds * len(resizes))
    assert totals[1] == pytest.approx(totals[0])


def test_engines_of_any_degree_are_lost(make):
    made = make(*changing("parallelism_planner.resize_s=10", *LOST))
    _, result, records = run(made)
    checker = Checker(8 // made.rollout.tensor_parallel)
    checker.degree = made.rollout.tensor_parallel
    checker.read(records)
    assert set(checker.num_ends.values()) == {1} and len(result.steps) == 30
    resizes = [r for r in records if any(isinstance(c, Resize) for c in r.commands)]
    assert resizes and commands_of(records, Replace)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ("rollout.moves=false", "stream_trainer.kinds=[long]", "stream_trainer.enabled=true"),
            r"set rollout.moves=true or stream_trainer.kinds=\[\]",
        ),
        (
            ("rollout.routing=spread", "parallelism_planner.resize_s=-1"),
            "resize_s .* must be 0 or more",
        ),
        (("rollout.routing=best",), "routing"),
    ],
)
def test_what_does_not_go_together_is_refused(make, settings, message):
    with pytest.raises(ConfigError, match=message):
        make(*settings)


def test_too_many_losses_say_what_to_lower(make):
    made = make("rollout.routing=spread", "unkind.engine_life_s=15")
    with pytest.raises(ValueError, match=r"without a committed step between .* lower the rates"):
        simulate(made)
