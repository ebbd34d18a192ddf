"""What making room is worth where nodes are few and jobs wait for them.

120 jobs of mean four hours come within 60 hours to 12 + 6 nodes; the shipped policy, restarts
charged. `waits`: nobody moves or is stopped, and a promise that waiting broke still binds its
group; `joins`: such a promise binds nobody, and a wait counts in placement; `moves`: and a job
moves at its commit, so that one that waits fits. And with every sixth job of one priority more:
those wait in the queue alone (`moves`), or others are stopped for them (`stops`).

    python benchmarks/cluster_room.py            # five minutes on a quiet core
    python benchmarks/cluster_room.py --quick    # one seed of 40 jobs, nothing is written
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from statistics import fmean
from typing import Any
from unittest.mock import patch

from lab import ROOT, bench, markdown
from msgspec import structs

from rollpacker.cluster.decide.cheapest_work import CheapestWork
from rollpacker.cluster.decide.events import Command, Start, Stop
from rollpacker.cluster.sim.jobs import Arrival, arrivals
from rollpacker.cluster.sim.simulation import Simulation
from rollpacker.cluster.sim.spec import ClusterSpec, load_cluster

MIXED = ROOT / "configs/clusters/mixed.yaml"
FEW = ("pools.0.nodes=12", "pools.1.nodes=6", "jobs.mean_hours=4", "jobs.hours=60")
SEEDS = 3
URGENT = 6
"""Every sixth job."""
ARMS: Mapping[str, Sequence[str]] = {
    "waits": ("by_moving", "by_stopping"),
    "joins": ("by_moving", "by_stopping"),
    "moves": ("by_stopping",),
    "stops": (),
}
"""Functions of the core that find no room in an arm."""
PARTS = {"all_alike": ("waits", "joins", "moves"), "urgent": ("moves", "stops")}


class Watched(Simulation):
    """Counts what is not in a result."""

    def __init__(self, spec: ClusterSpec, jobs: Sequence[Arrival], arm: str) -> None:
        policy = CheapestWork(makes_room=arm != "waits")
        super().__init__(spec, jobs, "rollpacker", chosen=policy)
        self.waits_h: dict[str, float] = {}
        self.restarts = 0
        self.stops = 0

    def _obey(self, command: Command) -> None:
        if isinstance(command, Start):
            life = self._lives[command.job]
            if command.job in self.waits_h:
                self.restarts += 1
            else:
                self.waits_h[command.job] = (self.now_s - life.submitted_s) / 3600
        self.stops += isinstance(command, Stop)
        super()._obey(command)


def run(work: tuple[str, str, Sequence[str]]) -> dict[str, float]:
    """One simulation: of a part, an arm and settings."""
    part, arm, settings = work
    urgent = part == "urgent"
    spec = load_cluster(MIXED, settings)
    jobs = [
        replace(one, job=structs.replace(one.job, priority=int(urgent and n % URGENT == 0)))
        for n, one in enumerate(arrivals(spec))
    ]
    with ExitStack() as stack:
        for name in ARMS[arm]:
            stack.enter_context(
                patch(f"rollpacker.cluster.decide.cluster.{name}", return_value=None)
            )
        simulation = Watched(spec, jobs, arm)
        result = simulation.run()
    waits_h = simulation.waits_h
    row = {
        "wait_mean_h": fmean(waits_h.values()),
        "wait_longest_h": max(waits_h.values()),
        "jobs_per_day": len(jobs) / (simulation.now_s - jobs[0].at_s) * 86400,
        "slo_kept": result.slo_kept,
        "slowdown_mean": result.slowdown_mean,
        "price_per_h": result.price_per_h,
        "restarts": simulation.restarts,
    }
    if urgent:
        first = [waits_h[one.job.name] for one in jobs if one.job.priority]
        row |= {"urgent_wait_mean_h": fmean(first), "stops": simulation.stops}
    return row


def table(rows: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Means over seeds, and their range."""
    names = [*next(iter(rows.values()))[0]]
    lines = []
    for arm, seeds in rows.items():
        cells = []
        for name in names:
            values = [row[name] for row in seeds]
            cells.append(f"{fmean(values):.2f} ({min(values):.2f} to {max(values):.2f})")
        lines.append([arm, *cells])
    return markdown(["", *names], lines)


def main(
    *settings: str, seeds: int = SEEDS, workers: int = 1, quick: bool = False
) -> dict[str, Any]:
    common = (*FEW, "jobs.count=40" if quick else "jobs.count=120", *settings)
    works = [
        (part, arm, (*common, f"seed={seed}"))
        for part, arms in PARTS.items()
        for arm in arms
        for seed in range(1, 2 if quick else seeds + 1)
    ]
    found: dict[str, dict[str, list[Any]]] = {
        part: {arm: [] for arm in arms} for part, arms in PARTS.items()
    }
    with ProcessPoolExecutor(workers) as pool:
        for (part, arm, own), row in zip(works, pool.map(run, works), strict=True):
            found[part][arm].append(row)
            print(part, arm, own[-1], row, flush=True)
    for part in PARTS:
        print(table(found[part]))
    return {"settings": common, **found}


if __name__ == "__main__":
    bench(main)
