"""The result of a simulated cluster, with the tables that show it."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollpacker.cluster.decide.nodes import Pool
from rollpacker.cluster.sim.policies import POLICIES
from rollpacker.report.table import MAX_WIDTH, lines

SLO_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class JobResult:
    """The outcome of one simulated job under one policy (where jobs are placed)."""

    name: str
    slo: float
    slowdown: float
    """The job's elapsed time over its time without waits for pools and switches."""

    @property
    def kept(self) -> bool:
        return self.slowdown <= self.slo * (1 + SLO_TOLERANCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyResult:
    """The outcome of all jobs under one policy."""

    price_per_h: float
    """Price of all nodes used, divided by the hours that the jobs would take without sharing."""
    jobs: tuple[JobResult, ...]
    peak_devices: Mapping[str, int]
    """Largest number of devices in use at the same time, by pool."""
    busy: Mapping[str, float]
    """Share of the paid device time in which devices generated or trained, 0 to 1, by pool."""

    @property
    def slo_kept(self) -> float:
        """Share of the jobs whose slowdown was not above the promised one."""
        return sum(job.kept for job in self.jobs) / len(self.jobs)

    @property
    def slowdown_mean(self) -> float:
        return math.fsum(job.slowdown for job in self.jobs) / len(self.jobs)

    def to_plain(self) -> dict[str, object]:
        """Return the values that `rollpacker cluster simulate --json` prints, by name."""
        return {
            "price_per_h": self.price_per_h,
            "slo_kept": self.slo_kept,
            "slowdown_mean": self.slowdown_mean,
            "peak_devices": dict(self.peak_devices),
            "busy": dict(self.busy),
        }


class Bill:
    """Adds up which nodes are rented over a simulation, and what they cost."""

    def __init__(self, pools: Sequence[Pool]) -> None:
        self._pools = {pool.name: pool for pool in pools}
        self._open = dict.fromkeys(self._pools, 0.0)
        self._peak = dict.fromkeys(self._pools, 0.0)
        self._node_s = dict.fromkeys(self._pools, 0.0)
        self._busy_s = dict.fromkeys(self._pools, 0.0)
        self._at_s = 0.0

    def pass_until(self, at_s: float) -> None:
        """Add the cost of the rented nodes from the last call until the time `at_s`."""
        for pool, count in self._open.items():
            self._node_s[pool] += count * (at_s - self._at_s)
        self._at_s = at_s

    def change(self, pool: str, nodes: int) -> None:
        """Rent this many more nodes of a pool, or give back as many if the number is negative."""
        self._open[pool] += nodes
        self._peak[pool] = max(self._peak[pool], self._open[pool])

    def work(self, pool: str, node_s: float) -> None:
        """Add to a pool's busy time the seconds, over all nodes, of generating or training."""
        self._busy_s[pool] += node_s

    def price(self) -> float:
        """Return what all nodes have cost so far."""
        return math.fsum(
            seconds / 3600 * self._pools[pool].node_price_per_h
            for pool, seconds in self._node_s.items()
        )

    def result(self, jobs: Sequence[JobResult], hours: float) -> PolicyResult:
        """Return the outcome. `jobs`: outcomes of all jobs. `hours`: what the cost of all nodes is
        divided by to give a price per hour (`hours_alone`)."""
        devices = {name: pool.devices_per_node for name, pool in self._pools.items()}
        return PolicyResult(
            price_per_h=self.price() / hours,
            jobs=tuple(sorted(jobs, key=lambda job: job.name)),
            peak_devices={pool: round(peak) * devices[pool] for pool, peak in self._peak.items()},
            busy={
                pool: self._busy_s[pool] / seconds if seconds else 0.0
                for pool, seconds in self._node_s.items()
            },
        )


Results = Mapping[str, PolicyResult]
"""The outcome of a simulation under each policy, by its name. All are compared with the first."""


def render(results: Results) -> str:
    """Return two tables: a row for each policy, and a row for each policy and pool."""
    first = next(iter(results.values()))
    rows = [["policy", "price/h", "of the first", "SLO kept", "slowdown"]]
    for name, one in results.items():
        rows.append(
            [
                *(name, f"{one.price_per_h:,.2f}", f"{one.price_per_h / first.price_per_h:.2f}x"),
                *(f"{one.slo_kept:.1%}", f"{one.slowdown_mean:.3f}"),
            ]
        )
    pools = [["devices", "pool", "peak", "busy"]]
    for name, one in results.items():
        for pool, peak in one.peak_devices.items():
            pools.append([name, pool, f"{peak:,}", f"{one.busy[pool]:.0%}"])
    return "\n".join([*lines(rows), "", *lines(pools)])


def explain(results: Results) -> str:
    """Return a text that explains the columns of the tables, and the policies in them."""
    told = (
        "Price/h is the whole price over the hours that the jobs would take without sharing; "
        "slowdown is elapsed over elapsed without waits for pools and switches, over a job's life; "
        "busy is of the device time that is paid for."
    )
    told = textwrap.fill(told, MAX_WIDTH)
    return "\n".join([told, "", *(f"  {name:<10}  {POLICIES[name]}" for name in results)])
