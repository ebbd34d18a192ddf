"""A simulated run: the bus (event loop) of a real run, with ports that only know how long things
take. Ports obey the scheduling core's commands (above each line) and answer with events (beside).

      ports/rollout    ports/rewards    ports/training    simulation      responses
        Launch, Abort,   Score,           StartGradients,   FetchPrompts    Defer
        Place, Move,     CancelScore      TrainOn,
        Replace, Release                  SyncWeights, Commit
           |  finishes      |  verdicts       |  Trained, ...   |  prompts
           v                v                 v                 v
        +------- clock: earliest event first, ties in order of scheduling ------+
        |          (sim/unkind: what goes wrong on the way, if anything)        |
        +----> bus.take(event): job.handle(event), each command at its port ----+

Nothing is decided here. Every launch, abort, release and check is a command of the same core that
drives a real run.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace

from rollpacker.bus import Bus, OwnPools, Port, Recorded, Routes, Sink, Unsaid
from rollpacker.core.commands import (
    Act,
    CancelAct,
    Conclude,
    Drop,
    FetchPrompts,
    Finish,
    RestoreTrainer,
)
from rollpacker.core.events import Event, PromptsFetched, RunStarted
from rollpacker.core.job.config import JobConfig
from rollpacker.core.job.pooled_job import make_job
from rollpacker.sim.carried_turns import CarriedTurns
from rollpacker.sim.clock import VirtualClock
from rollpacker.sim.machine import Machine
from rollpacker.sim.ports.environments import Environments
from rollpacker.sim.ports.recorded_rewards import RecordedRewards
from rollpacker.sim.ports.rewards import Rewards
from rollpacker.sim.ports.rollout import Rollout
from rollpacker.sim.ports.training import GradientWork, Training
from rollpacker.sim.ports.turns import Turns
from rollpacker.sim.responses import Responses
from rollpacker.sim.result import SystemResult
from rollpacker.sim.tally import Tally
from rollpacker.sim.unkind import Unkind, UnkindConfig
from rollpacker.sim.workload import Workload


class Simulation:
    """One simulated run. `run` may be called only once."""

    def __init__(
        self,
        config: JobConfig,
        machine: Machine,
        workload: Workload,
        *,
        unkind: UnkindConfig | None = None,
        seed: int = 0,
        observe: Sink | None = None,
        pools: Port | None = None,
    ) -> None:
        """`unkind`: rates of faults, drawn with `seed`; None: no faults. `observe` is called with
        every event and the commands with which the scheduling core answers it; None: nobody
        watches. `pools` makes the run wait for devices that jobs share; None: it has its own."""
        self.job = make_job(config)
        self.clock = clock = VirtualClock()
        self._tally = tally = Tally(machine.gpus, workload, machine.train_gpus or 0)
        self._take_prompts = workload.take
        responses = Responses(workload, config.tail_batching, machine.mismatch)
        work, cap = GradientWork(), config.max_response_tokens
        num_engines = 1 if config.fleet is None else config.fleet.num_engines
        trajectories = workload.trajectories
        carried = CarriedTurns.of(machine, workload, responses)
        turns = Turns.of(machine, workload, responses, carried)
        self.rollout = Rollout(clock, machine, responses, tally, work, cap, num_engines, turns)
        parts = clock, machine, workload, responses, cap
        rewards = Rewards(*parts)
        if machine.checks is not None:
            rewards = RecordedRewards(*parts, machine.checks, self.rollout.is_busy)
        acting: Port = Unsaid(Act, CancelAct, Conclude)
        if trajectories is not None:
            acting = Environments(clock, responses, trajectories, self.rollout.concluded)
        ports: tuple[Port, ...] = (self.rollout, rewards, acting)
        self._unkind: Unkind | None = None
        if unkind is not None:
            self._unkind = Unkind(unkind, *ports, seed=seed)
            rewards.delay_s = self._unkind.delay_s
            if isinstance(acting, Environments):
                acting.hangs = self._unkind.hangs
            self.rollout.life_s = self._unkind.life_s
            self.rollout.start_s = unkind.engine_start_s
            ports = (self._unkind,)
        self._bus = Bus(
            self.job,
            clock,
            (
                *ports,
                Training(clock, machine, responses, tally, work, self._on_step),
                carried or responses,
                Recorded(Drop, RestoreTrainer),  # a simulated trainer is never lost
                pools or OwnPools(lambda event: self._bus.take(event)),
                self,
            ),
            sinks=() if observe is None else (observe,),
        )
        self._pipeline, self._verified = machine.pipeline, (carried or responses).verified
        self._num_steps = 0
        """Number of optimizer steps to simulate."""
        self._progress: Callable[[int], None] = lambda steps: None
        self._finished: str | None = None

    def routes(self) -> Routes:
        return {FetchPrompts: self._fetch, Finish: self._finish}

    def run(self, steps: int, progress: Callable[[int], None] = lambda steps: None) -> SystemResult:
        """Simulate `steps` steps. `progress` is called after each step with the number of steps
        done. Raises `ValueError` if the run ends before, because nothing was left to train on."""
        self._progress = progress
        # Rounds leave no reference cycles behind, and looking for some takes time.
        collecting = gc.isenabled()
        gc.disable()
        try:
            self.begin(steps)
            self.advance()
        finally:
            if collecting:
                gc.enable()
        return self.result()

    def begin(self, steps: int) -> None:
        """Start a run of `steps` steps, to be driven by `advance`."""
        self._num_steps = steps
        self.clock.after(0.0, RunStarted(time_s=0.0))
        self.rollout.begin()

    def advance(self, until_s: float | None = None) -> None:
        """Handle all events up to the time `until_s` in seconds; None: up to the end of the run."""
        take = self._bus.take_alone if self._unkind is None else self._take_unkindly
        self.clock.run(take, until_s)

    def result(self) -> SystemResult:
        """The result of a run that is over. Its seconds include waits for shared pools of devices.
        Raises `ValueError` if the run ended before its last step."""
        done, steps = len(self._tally.steps), self._num_steps
        if done < steps:
            hint = "lower the rates of unkind" if self._unkind else "simulate fewer steps"
            raise ValueError(f"the run ended after {done} steps: {self._finished}; {hint}")
        mismatch = self._verified.mismatch
        result = self._tally.result(self.job.stream.num_releases, mismatch)
        if self._pipeline is None:
            return result
        return replace(result, pipeline=self._pipeline.result())

    def _take_unkindly(self, event: Event) -> None:
        assert self._unkind is not None
        self._bus.take_alone(self._unkind.answer(event))

    def _on_step(self, committed: Event) -> None:
        done = len(self._tally.steps)
        if done == self._num_steps:  # what the core wants next is not done any more
            self.clock.last = committed
        self._progress(done)

    def _fetch(self, command: FetchPrompts) -> None:
        prompts, epoch_ended, data_ended = self._take_prompts(command.count)
        fetched = PromptsFetched(
            time_s=0.0, prompts=prompts, epoch_ended=epoch_ended, data_ended=data_ended
        )
        self.clock.after(0.0, fetched)

    def _finish(self, command: Finish) -> None:
        self._finished = command.reason
        self.clock.stop()
