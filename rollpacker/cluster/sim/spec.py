"""The file that `rollpacker cluster` reads (`configs/clusters/`): pools and a simulation's jobs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rollpacker.bounds import check_at_least, check_positive, check_within
from rollpacker.cluster.decide.job import Phase
from rollpacker.cluster.decide.nodes import Pool
from rollpacker.cluster.decide.waiting import AGEING_H, PHASES
from rollpacker.config.load import load_config
from rollpacker.did_you_mean import did_you_mean
from rollpacker.sim.hardware import GPUS
from rollpacker.sim.scenario_checks import check_known

Profile = Literal["balanced", "rollout-heavy", "train-heavy", "mixed"]
MAX_JOBS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """A pool of equal nodes (`pools.N.*`)."""

    name: str
    """Name of the pool, as in tables and in names of nodes."""
    phase: Phase
    """The phase that the pool's nodes are for: rollout or train."""
    nodes: int
    """Number of the pool's nodes, all of which may be in use at the same time."""
    devices_per_node: int = 8
    """Number of devices of each node. A job gets whole nodes."""
    gpu: str | None = None
    """GPU of the nodes, by a datasheet's name (`rollpacker simulate --presets`). Jobs' seconds are
    those on the phase's first pool; on another GPU rollouts scale with memory bandwidth, and
    training with arithmetic. None: as fast as the first pool."""
    price_per_device_h: float
    """Price of one device in use per hour, in any currency."""
    host_memory_gib: float
    """GiB of host memory of one node, for jobs that are off its devices while others use them."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "nodes", "devices_per_node")
        if self.gpu is not None:
            check_known("gpu", self.gpu, GPUS)
        check_positive(self, "price_per_device_h", "host_memory_gib")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsSpec:
    """The jobs of a simulation (`jobs.*`): drawn at random, or read from a trace."""

    trace: str | None = None
    """Path of a JSONL file with a job on each line, relative to the folder in which the command
    runs; the other keys then have no effect. None: jobs are drawn at random."""
    count: int = 300
    """Number of jobs that are drawn."""
    hours: float = 580.0
    """Hours in which the jobs arrive, at evenly distributed random moments."""
    mean_hours: float = 14.4
    """Mean hours of a job's life without waits. Lives are log-normal, up to ten times this."""
    profile: Profile = "mixed"
    """Which phase of the jobs is longer: none (balanced), rollout or training. mixed: a third of
    the jobs have each."""
    slo: tuple[float, float] = (1.0, 2.0)
    """Lowest and highest SLO (slowdown promised) of the jobs, drawn evenly between the two."""
    variation: float = 0.1
    """Standard deviation of the length of iterations over its mean. 0: all have the same length."""
    growth: float = 0.0
    """Share by which rollouts and training are longer at the end of a job's life than at its begin,
    growing evenly. Policies are not told of this growth beforehand."""
    tail_share: float = 0.2
    """Share of a rollout, its last part (tail), that needs only an eighth of its devices."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "count")
        if self.count > MAX_JOBS:
            raise ValueError(f"count must be at most {MAX_JOBS:,}, not {self.count:,}")
        check_positive(self, "hours", "mean_hours")
        low, high = self.slo
        if not 1 <= low <= high < math.inf:
            raise ValueError(
                f"slo must be two rising numbers of 1 or more, not {low:g} and {high:g}: alone "
                "a job has a slowdown of 1, and sharing makes no job faster"
            )
        check_within(self, "[0, 1]", "variation")
        if not (math.isfinite(self.growth) and self.growth > -1):
            raise ValueError(f"growth must be above -1, not {self.growth}")
        check_within(self, "[0, 1)", "tail_share")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """A cluster: pools that several jobs share, and rules for sharing them."""

    name: str
    """Name of the cluster, as in tables and in its folder."""
    pools: tuple[PoolSpec, ...]
    """The pools of nodes, at least one for each phase."""
    link_gb_s: float
    """Rate of the link between the pools for each device, in 1e9 bytes per second."""
    max_group: int = 5
    """Largest number of jobs in one group, which take turns on the same nodes."""
    slo_confidence: float = 0.99
    """Jobs share nodes only where every SLO is kept with this probability, from 0.5 to below 1."""
    order: Literal["auto", "round_robin", "first_come", "least_slack"] = "auto"
    """Order in which jobs take turns on nodes. auto: the cheapest order for each group of jobs."""
    quotas: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Most devices for rollout and train that an owner's running jobs may have asked for together,
    by owner; shared devices count in full. An owner or a phase that is absent has no bound."""
    ageing_h: float = AGEING_H
    """Hours of waiting that one unit of priority is worth: a waiting job comes before jobs with one
    unit more that were submitted at least this much later."""
    jobs: JobsSpec = JobsSpec()
    """The jobs of a simulation, ignored by a real cluster."""
    seed: int = 0
    """Seed from which a simulation's jobs and iterations are drawn."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "max_group")
        check_positive(self, "link_gb_s")
        check_within(self, "[0.5, 1)", "slo_confidence")
        check_at_least(self, 0, "ageing_h")
        self._check_quotas()
        names = [pool.name for pool in self.pools]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f'pools has two pools with the name "{name}": give each its own')
        for phase in ("rollout", "train"):
            if not any(pool.phase == phase for pool in self.pools):
                raise ValueError(f"pools has none with phase: {phase}; add one")

    def _check_quotas(self) -> None:
        for owner, quota in self.quotas.items():
            for phase, most in quota.items():
                if phase not in PHASES:
                    raise ValueError(
                        f'quotas.{owner} has no key "{phase}".{did_you_mean(phase, PHASES)} Known: '
                        "rollout, train, each with a number of devices"
                    )
                if most < 1:
                    raise ValueError(
                        f"quotas.{owner}.{phase} must be 1 or more devices, not {most}"
                    )

    def core_quotas(self) -> dict[str, dict[Phase, int]]:
        """Return the quotas (most devices), by owner and phase, as `Cluster` takes them."""
        return {
            owner: {phase: quota[phase] for phase in PHASES if phase in quota}
            for owner, quota in self.quotas.items()
        }

    def core_pools(self) -> tuple[Pool, ...]:
        """Return the pools as the `Cluster` class takes them."""
        return core_pools(self.pools)


def core_pools(pools: Sequence[PoolSpec]) -> tuple[Pool, ...]:
    """Return the pools as `Cluster` takes them, with `scale` from their GPUs (`seconds_scale`)."""
    return tuple(
        Pool(
            name=pool.name,
            phase=pool.phase,
            nodes=pool.nodes,
            devices_per_node=pool.devices_per_node,
            price_per_device_h=pool.price_per_device_h,
            host_memory_gib=pool.host_memory_gib,
            scale=seconds_scale(pool.phase, reference(pools, pool.phase).gpu, pool.gpu),
        )
        for pool in pools
    )


def reference(pools: Sequence[PoolSpec], phase: Phase) -> PoolSpec:
    """Return the first pool of a phase: seconds in jobs' profiles are those on its GPUs."""
    return next(pool for pool in pools if pool.phase == phase)


def seconds_scale(phase: Phase, measured_on: str | None, gpu: str | None) -> float:
    """Return the seconds of a phase on `gpu` over those on `measured_on`; 1 if either is None."""
    if measured_on is None or gpu is None:
        return 1.0
    if phase == "rollout":
        return GPUS[measured_on].bandwidth_tb_s / GPUS[gpu].bandwidth_tb_s
    return GPUS[measured_on].tflops / GPUS[gpu].tflops


def load_cluster(path: str | Path, overrides: Sequence[str] = ()) -> ClusterSpec:
    """Load the cluster's file. `overrides`: settings as key=value. Raises `ConfigError`."""
    return load_config(path, overrides, ClusterSpec)
