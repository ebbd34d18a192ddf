"""Reads phase times of a cluster's jobs from a run's log, or simulates them from a scenario.

Seconds are those of the cluster's first pool of each phase. A scenario is simulated on the GPUs of
these pools; a run was measured on what it had.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rollpacker.cluster.decide.job import EMPTY, Iteration, Phase, RoundTimes
from rollpacker.cluster.profile.job_profile import (
    check_device,
    needs_of,
    read_profile,
    rounds_of,
    run_needs,
)
from rollpacker.cluster.sim.spec import PoolSpec, core_pools, reference
from rollpacker.sim.scenario import Scenario, load_scenario
from rollpacker.sim.scenario_checks import TRAINED_PARAMETER_BYTES
from rollpacker.sim.simulate import simulate

PARKED_PARAMETER_BYTES = TRAINED_PARAMETER_BYTES - 4
"""Bytes of host memory per parameter of a trainer off the devices (parked), without gradients."""


class Profile(NamedTuple):
    """How long a job's phases take, what else it needs, and how many steps it has."""

    rounds: tuple[RoundTimes, ...]
    needs: dict[str, Any]
    """Other fields of the job's `ClusterJob`, by name, such as memory."""
    steps: int | None
    """Number of steps of the job. None if unknown."""


def profile_of_run(folder: str | Path, pools: Sequence[PoolSpec]) -> Profile:
    """Return the profile (phases' times, needs) of the run in this folder. Raises `ValueError` if
    it cannot be used: it is no run, or was measured on CPUs and a pool has GPUs."""
    found = read_profile(folder)
    check_device(found, on_gpus=any(pool.gpu is not None for pool in pools))
    needs = run_needs(found, core_pools(pools))
    return Profile(found.rounds, needs, found.config.train.steps)


def profile_of_scenario(path: str | Path, pools: Sequence[PoolSpec]) -> Profile:
    """Return the profile (phases' times, needs) of a simulated scenario. Sending weights is left
    out: the cluster's link tells how long it takes. Raises `ConfigError` for a wrong file."""
    scenario = on_pools(load_scenario(path), pools)
    steps = simulate(scenario).steps
    iterations = [
        Iteration(
            step=number,
            kind=step.kind if step.train_s > 0 else EMPTY,
            rollout_s=step.rollout_s,
            between_s=step.reward_s,
            train_s=step.train_s,
            after_s=0.0,
        )
        for number, step in enumerate(steps, 1)
    ]
    return Profile(rounds_of(iterations), _scenario_needs(scenario, pools), None)


def on_pools(scenario: Scenario, pools: Sequence[PoolSpec]) -> Scenario:
    """Return the scenario on the GPUs of these pools (its own if a pool names none), with as many
    devices as before. Streaming is off: on shared pools training never overlaps with generation."""
    cluster = scenario.cluster
    gpus = {phase: _gpu(pools, phase) for phase in ("rollout", "train")}
    trainer = cluster.gpu if cluster.train_gpu is None else cluster.train_gpu
    return dataclasses.replace(
        scenario,
        cluster=dataclasses.replace(
            cluster,
            gpu=gpus["rollout"] or cluster.gpu,
            train_gpu=gpus["train"] or trainer,
            train_gpus=cluster.trainer_gpus,
        ),
        stream_trainer=dataclasses.replace(scenario.stream_trainer, enabled=False),
    )


def _gpu(pools: Sequence[PoolSpec], phase: Phase) -> str | None:
    return reference(pools, phase).gpu if pools else None


def _scenario_needs(scenario: Scenario, pools: Sequence[PoolSpec]) -> dict[str, Any]:
    cluster = scenario.cluster
    return needs_of(
        model_bytes=scenario.shape.weight_bytes,
        trainer_bytes=scenario.shape.params * PARKED_PARAMETER_BYTES,
        devices={"rollout": cluster.gpus, "train": cluster.trainer_gpus},
        num_copies=cluster.gpus // scenario.rollout.tensor_parallel,
        pools=core_pools(pools),
    )
