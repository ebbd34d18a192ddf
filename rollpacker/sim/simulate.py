"""Simulates a scenario: makes a machine and the scheduling core's config from it, and runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rollpacker.bus import Sink
from rollpacker.core.checks.deadlines import AdaptiveDeadlineConfig
from rollpacker.core.checks.reward_schedule import RewardKindConfig, RewardScheduleConfig
from rollpacker.core.fleet.fleet import FleetConfig
from rollpacker.core.fleet.parallelism import ParallelismConfig
from rollpacker.core.fleet.stream_plan import DeviceLayout
from rollpacker.core.job.config import JobConfig
from rollpacker.core.rounds.tail_batching import TailBatchingConfig
from rollpacker.pipeline.sim.machine import pipeline_of
from rollpacker.sim.latency import Calibration, DatasheetModel
from rollpacker.sim.machine import Machine
from rollpacker.sim.result import SystemResult
from rollpacker.sim.scenario import Scenario
from rollpacker.sim.simulation import Simulation
from rollpacker.sim.workload import Workload
from rollpacker.sim.workload_spec import RewardStage

DEDICATED_JUDGE_SHARE = 0.8
"""Share of its calls per second, when it shares all devices, that a judge model reaches on devices
of its own. This value is assumed: it puts the speed of steps without sharing in the middle of the
paper's Fig. 13a, which has 0.82 to 0.98 of the speed with sharing."""


def simulate(
    scenario: Scenario,
    *,
    calibration: Calibration | None = None,
    observe: Sink | None = None,
    progress: Callable[[int], None] = lambda steps: None,
) -> SystemResult:
    """Simulate `scenario.steps` steps of the scenario's system. `observe` is called with every
    event and the commands with which the scheduling core answers it; None: nobody watches.
    `progress` is called with the number of steps done. `calibration` None: the default constants.
    Raises `ConfigError` for an unreadable trace file."""
    machine = machine_of(scenario, calibration or Calibration())
    simulation = Simulation(
        job_config(scenario, machine),
        machine,
        Workload.of(scenario),
        unkind=scenario.unkind,
        seed=scenario.seed,
        observe=observe,
    )
    return simulation.run(scenario.steps, progress)


def machine_of(scenario: Scenario, calibration: Calibration) -> Machine:
    """The simulated machine of a scenario, with times from datasheets and the fitted constants."""
    rollout, scheduler = scenario.rollout, scenario.reward_scheduler
    share = 1.0
    if not scheduler.overlap:
        share *= calibration.synchronous_judge_share
    if not scheduler.colocated_judge:
        share *= DEDICATED_JUDGE_SHARE
    latency = DatasheetModel(
        model=scenario.shape,
        gpu=scenario.cluster.gpu_spec,
        train_gpu=scenario.cluster.trainer_gpu_spec,
        calibration=calibration,
        prompt_tokens=rollout.prompt_tokens,
        train_fixed_given_s=scenario.train.fixed_s,
        sync_given_s=scenario.sync_s,
    )
    return Machine(
        latency=latency,
        gpus=scenario.cluster.gpus,
        train_gpus=scenario.cluster.trainer_gpus if scenario.cluster.is_apart else None,
        prompt_tokens=rollout.prompt_tokens,
        max_running=rollout.max_running,
        speculation=rollout.speculation,
        drafts=rollout.drafts,
        check_slowdown={"judge": 1 / share},
        keep_rows=scenario.turns is None or scenario.turns.keep_rows,
        carries_turns=scenario.turns is not None and scenario.tail_batching.carries,
        mismatch=scenario.carry.mismatch,
        resize_s=scenario.parallelism_planner.resize_s,
        pipeline=pipeline_of(scenario.trainer, latency, seed=scenario.seed),
    )


def job_config(scenario: Scenario, machine: Machine) -> JobConfig:
    """The scheduling core's config for a scenario. It limits no number of steps, since the
    simulation itself stops after the last one."""
    rollout, scheduler = scenario.rollout, scenario.reward_scheduler
    layouts = _layouts(scenario, machine)
    degrees = tuple(sorted(layout.tensor_parallel for layout in layouts))
    kinds = tuple(stage.kind for stage in scenario.stages)
    return JobConfig(
        prompts_per_step=rollout.prompts_per_step,
        samples_per_prompt=rollout.samples_per_prompt,
        max_steps=None,
        max_response_tokens=scenario.max_tokens,
        prompt_tokens=rollout.prompt_tokens,
        tail_batching=_tail(scenario),
        rewards=RewardScheduleConfig(
            overlap=scheduler.overlap,
            order=scheduler.order,
            cancel=scheduler.cancel,
            kinds={
                stage.kind: _reward_kind(stage, scheduler.adaptive_timeout)
                for stage in scenario.stages
            },
        ),
        acting=None if scenario.turns is None else scenario.turns.acting(kinds),
        parallelism=ParallelismConfig(
            enabled=scenario.parallelism_planner.enabled,
            degrees=degrees,
            initial=rollout.tensor_parallel,
        ),
        stream=scenario.stream_trainer,
        trainer_apart=scenario.cluster.is_apart,
        layouts=layouts,
        speculate=() if rollout.speculation is None else rollout.speculation.kinds,
        fleet=FleetConfig(
            num_engines=scenario.cluster.gpus // rollout.tensor_parallel,
            routing=rollout.routing,
            moves=rollout.moves,
            num_devices=scenario.cluster.gpus if scenario.parallelism_planner.enabled else None,
        ),
    )


def _tail(scenario: Scenario) -> TailBatchingConfig:
    """The scheduling core's settings of tail batching. If samples have turns, its `carry` is
    "none", since the machine keeps deferred trajectories' tokens (`Machine.carries_turns`)."""
    tail = scenario.tail_batching
    return replace(tail, carry="none") if scenario.turns is not None and tail.carries else tail


def _reward_kind(stage: RewardStage, adaptive: bool) -> RewardKindConfig:
    deadline = None
    if stage.limit_s is not None:
        default = AdaptiveDeadlineConfig()
        deadline = AdaptiveDeadlineConfig(
            min_s=min(default.min_s, stage.limit_s), max_s=stage.limit_s, adaptive=adaptive
        )
    return RewardKindConfig(workers=stage.num_workers or None, deadline=deadline)


def _layouts(scenario: Scenario, machine: Machine) -> tuple[DeviceLayout, ...]:
    """Layouts (which devices form an engine) for the tensor-parallel degrees that the planner may
    choose, the scenario's own first, except degrees at which an engine leaves its node or cannot
    hold a response of full length."""
    cluster, rollout = scenario.cluster, scenario.rollout
    longest = rollout.prompt_tokens + scenario.max_tokens
    own = rollout.tensor_parallel
    others = [d for d in range(1, cluster.node_gpus + 1) if cluster.node_gpus % d == 0 and d != own]
    layouts = []
    for degree in [own, *(others if scenario.parallelism_planner.enabled else [])]:
        try:
            capacity = machine.latency.kv_tokens(degree)
        except ValueError:  # the weights do not fit
            continue
        if capacity is not None and capacity < longest:
            continue
        layouts.append(
            DeviceLayout(
                gpus=cluster.gpus,
                gpus_per_node=cluster.gpus_per_node,
                tensor_parallel=degree,
                train_group=1 if cluster.is_apart else scenario.train.replica_gpus,
                kv_tokens=capacity,
            )
        )
    return tuple(layouts)
