"""Whole simulated jobs on shared pools, whose turns the cluster's core decides: the real
`PooledJob`s, the real `Cluster`, virtual time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from rollpacker.bus import Routes
from rollpacker.cluster.decide.cheapest_work import CheapestWork
from rollpacker.cluster.decide.cluster import Cluster
from rollpacker.cluster.decide.events import Asked, Command, Ended, Grant, Left, Start, Submitted
from rollpacker.cluster.decide.events import Committed as IterationOver
from rollpacker.cluster.decide.group import closed_form_holds, closed_period_s, period_s
from rollpacker.cluster.decide.job import ClusterJob, Iteration, RoundTimes
from rollpacker.cluster.profile.phase_times import PhaseTimes
from rollpacker.core.commands import Enter, Leave, Remind, TrainOn
from rollpacker.core.events import Committed, Entered, Reminded
from rollpacker.core.ids import PoolName
from rollpacker.core.records import Entry, Record
from rollpacker.report.time_book import POOL_CAUSES
from rollpacker.sim.latency import Calibration
from rollpacker.sim.simulate import job_config, machine_of
from rollpacker.sim.simulation import Simulation
from rollpacker.sim.workload import Workload
from tests.core.test_coexecution import H20, H800
from tests.report.test_pools import booked
from tests.sim.test_simulation import scenario

POOLS = (replace(H20, nodes=1), replace(H800, nodes=1))
SWITCH_S: Mapping[PoolName, float] = {"rollout": 0.5, "train": 0.75}
FIXED = (
    "lengths={quantiles: {1e-9: 3000, 0.01: 3000, 0.5: 3000, 0.9: 3000, 0.98: 3000}}",
    "rewards=[{kind: math, share: 1.0}]",
    "tail_batching.enabled=false",
)
"""Every response is as long as any other, and every check."""
STEPS = 24


def settings_of(number: int, *, fixed: bool) -> list[str]:
    """Jobs of different phases."""
    prompts = (16, 32, 8)[number]
    plain = ["stream_trainer.enabled=false", f"rollout.prompts_per_step={prompts}"]
    return [*plain, *FIXED] if fixed else [*plain, f"seed={number}"]


class Life:
    """One job: its simulation, its port for pools, and what was seen of it."""

    def __init__(self, name: str, folder: Path, overrides: list[str], host: Host | None) -> None:
        self.name, self.host = name, host
        made = scenario(folder, *overrides)
        machine = machine_of(made, Calibration())
        config = replace(job_config(made, machine), shares_pools=host is not None)
        self.simulation = Simulation(
            config,
            machine,
            Workload(made),
            observe=self.observe,
            pools=None if host is None else self,
        )
        self.phases = PhaseTimes()
        self.iterations: list[Iteration] = []
        self.committed_s: list[float] = []
        self.log: list[Entry] = []
        self.awaited: PoolName | None = None
        self.token = 0

    def routes(self) -> Routes:
        return {Enter: self.enter, Leave: self.leave, Remind: self.remind}

    def remind(self, command: Remind) -> None:
        self.simulation.clock.after(command.after_s, Reminded(time_s=0.0))

    def enter(self, command: Enter) -> None:
        assert self.host is not None and self.awaited is None
        self.awaited = command.pool
        self.host.tell(Asked(self.host.now_s, self.name, command.pool))

    def granted(self, grant: Grant) -> None:
        """It is there after the switch."""
        assert self.host is not None and self.awaited == grant.phase
        self.awaited, self.token = None, grant.token
        switch_s = SWITCH_S[grant.phase]
        clock = self.simulation.clock
        entered = Entered(time_s=0.0, pool=grant.phase, switch_s=switch_s)
        clock.after(self.host.now_s - clock.time_s + switch_s, entered)

    def leave(self, command: Leave) -> None:
        assert self.host is not None
        self.host.held.pop(command.pool)
        self.host.tell(Left(self.host.now_s, self.name, command.pool, self.token))

    def observe(self, entry: Entry) -> None:
        self.log.append(entry)
        done = self.phases.feed(entry)
        if isinstance(entry, Record) and isinstance(entry.event, Committed):
            self.committed_s.append(entry.time_s)
        if done is not None:
            self.iterations.append(done)
            if self.host is not None:
                work_s = sum(done.times)
                self.host.tell(IterationOver(self.host.now_s, self.name, work_s))

    def trained(self) -> list[TrainOn]:
        records = [entry for entry in self.log if isinstance(entry, Record)]
        return [c for record in records for c in record.commands if isinstance(c, TrainOn)]


class Host:
    """A cluster of one node for each phase, and the jobs on it."""

    def __init__(self) -> None:
        policy = CheapestWork(moves=False, orders=("round_robin",))
        self.cluster = Cluster(POOLS, policy)
        self.lives: dict[str, Life] = {}
        self.held: dict[PoolName, str] = {}
        self.now_s = 0.0
        self.started: list[str] = []

    def tell(self, event: Submitted | Asked | Left | IterationOver | Ended) -> None:
        for command in self.cluster.handle(event):
            self.obey(command)

    def obey(self, command: Command) -> None:
        match command:
            case Start(job=name):
                self.started.append(name)
            case Grant(job=name, phase=phase):
                assert phase not in self.held, f"{self.held[phase]} has it, and now {name}"
                self.held[phase] = name
                self.lives[name].granted(command)
            case _:
                pass

    def run(self, steps: int) -> None:
        """Whatever happens next, in all jobs. They never end: who is done with its steps goes on
        until all are."""
        for life in self.lives.values():
            life.simulation.begin(10 * steps)
        while min(len(life.iterations) for life in self.lives.values()) < steps:
            life = min(self.lives.values(), key=lambda one: one.simulation.clock.next_s())
            self.now_s = life.simulation.clock.next_s()
            life.simulation.advance(self.now_s)


def demand(life: Life) -> ClusterJob:
    """What a job is, from its own log alone."""
    rounds = [one.times for one in life.iterations]
    rollout_s, between_s, train_s, after_s = (sorted(part) for part in zip(*rounds, strict=True))
    median = len(rounds) // 2
    distribution = RoundTimes(
        rollout_s=tuple(rollout_s),
        train_s=tuple(train_s),
        between_s=between_s[median],
        after_s=after_s[median],
    )
    return ClusterJob(
        name=life.name,
        rounds=(distribution,),
        steps=10 * STEPS,
        slo=20.0,
        rollout_switch_s=SWITCH_S["rollout"],
        train_switch_s=SWITCH_S["train"],
    )


def shared_and_alone(folder: Path, count: int, *, fixed: bool) -> tuple[Host, list[Life]]:
    alone = []
    for number in range(count):
        life = Life(f"job {number}", folder, settings_of(number, fixed=fixed), None)
        life.simulation.run(STEPS)
        alone.append(life)
    host = Host()
    for number, life in enumerate(alone):
        overrides = settings_of(number, fixed=fixed)
        host.lives[life.name] = Life(life.name, folder, overrides, host)
        host.tell(Submitted(0.0, demand(life)))
    assert host.started == [life.name for life in alone], "all are on the same nodes"
    host.run(STEPS)
    return host, alone


@pytest.mark.parametrize("count", [2, 3])
def test_jobs_of_fixed_lengths_take_the_period_that_is_foretold(tmp_path: Path, count: int) -> None:
    host, alone = shared_and_alone(tmp_path, count, fixed=True)
    holds = []
    for life in alone:
        first, *rest = (one.times for one in life.iterations)
        assert all(one == pytest.approx(first, rel=1e-6) for one in rest), "they are not fixed"
        holds.append(host.cluster.sharing(life.name).holds(first))
    pins = [frozenset({0})] * count
    foretold_s = period_s(holds, pins)
    assert closed_form_holds(holds, pins) and foretold_s == closed_period_s(holds, pins)
    for life in host.lives.values():
        begin, end = STEPS // 3, STEPS - 1
        took_s = (life.committed_s[end] - life.committed_s[begin]) / (end - begin)
        assert took_s == pytest.approx(foretold_s, rel=1e-9), life.name
    alone_s = sum(sum(life.iterations[0].times) for life in alone)
    assert foretold_s < alone_s, "sharing fills waits: one after the other would take longer"


@pytest.mark.parametrize("fixed", [True, False])
def test_each_computes_what_it_computes_alone_in_as_many_seconds_of_its_own(
    tmp_path: Path, fixed: bool
) -> None:
    host, alone = shared_and_alone(tmp_path, 3, fixed=fixed)
    for life in alone:
        shared = host.lives[life.name]
        assert shared.trained()[:STEPS] == life.trained()[:STEPS]
        for one, other in zip(life.iterations, shared.iterations, strict=False):
            assert (one.step, one.kind) == (other.step, other.kind)
            assert other.times == pytest.approx(one.times, rel=1e-6, abs=1e-6)
        seconds = booked(shared.log).seconds()
        waited_s = sum(seconds[cause] for cause in POOL_CAUSES)
        assert waited_s == pytest.approx(shared.phases.waited_s, rel=1e-6) and waited_s > 0
        num_turns = sum(
            isinstance(entry, Record) and isinstance(entry.event, Entered) for entry in shared.log
        )
        switches_s = seconds["switch"]
        assert switches_s == pytest.approx(num_turns * sum(SWITCH_S.values()) / 2, rel=0.05)
