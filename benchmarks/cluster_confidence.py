"""Whether SLOs are kept as often as is stated (`slo_confidence`), also where lengths grow.

    python benchmarks/cluster_confidence.py            # half an hour on a quiet core
    python benchmarks/cluster_confidence.py --quick

Jobs of every profile with drawn lengths come over a tenth of their number in days, in several
traces; all waits count, those for nodes too. With growth, rollouts and training take 30 % longer at
the end of a job's life than at its begin, which its profile does not say. The share of the jobs
that kept their SLO is to be at most 0.01 below what was stated.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from lab import ROOT, bench, markdown

from rollpacker.cluster.decide.cheapest_work import CheapestWork
from rollpacker.cluster.sim import simulation as cluster
from rollpacker.cluster.sim.jobs import arrivals
from rollpacker.cluster.sim.spec import load_cluster

MIXED = ROOT / "configs/clusters/mixed.yaml"
STATED = (0.9, 0.95, 0.99)
GROWTHS = (0.0, 0.3)
JOBS = 300
SETTINGS = (f"jobs.count={JOBS}", "jobs.mean_hours=4", "jobs.hours=161")
"""As many jobs at a time as in the file, of shorter lives, in which luck matters more."""
SEEDS = 12
BELOW = 0.01
ARMS: Mapping[str, Mapping[str, Any]] = {
    "shipped": {},
    "profile alone": {"learns": False, "mends": False},
}
"""Fields of the policy that an arm sets otherwise, by its name."""
Cell = tuple[str, float, float]
"""Arm, growth, and the share that was stated."""


def trace(work: tuple[Cell, int]) -> dict[str, Any]:
    """One trace of jobs: how many, who missed the SLO, and the price."""
    cell, seed = work
    arm, growth, stated = cell
    policy = dataclasses.replace(CheapestWork(confidence=stated), **ARMS[arm])
    began = time.process_time()
    spec = load_cluster(MIXED, [*SETTINGS, f"jobs.growth={growth}", f"seed={seed}"])
    result = cluster.Simulation(spec, arrivals(spec), "rollpacker", chosen=policy).run()
    missed = [one for one in result.jobs if not one.kept]
    print(*cell, seed, f"{result.slo_kept:.4f}", f"{time.process_time() - began:.0f} s", flush=True)
    return {
        "jobs": len(result.jobs),
        "missed": [{"seed": seed, **dataclasses.asdict(one)} for one in missed],
        "price_per_h": result.price_per_h,
    }


def summed(cell: Cell, traces: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of one cell, over all its traces."""
    arm, growth, stated = cell
    num_jobs = sum(one["jobs"] for one in traces)
    missed = [job for one in traces for job in one["missed"]]
    kept = 1 - len(missed) / num_jobs
    return {
        **{"arm": arm, "stated": stated, "growth": growth, "jobs": num_jobs, "kept": kept},
        "holds": kept >= stated - BELOW,
        "price_per_h": sum(one["price_per_h"] for one in traces) / len(traces),
        "missed": missed,
    }


def table(cells: list[dict[str, Any]]) -> str:
    """As docs/many-jobs-simulated.md has it: a row for each arm and growth."""
    head = ["", "lengths", *(f"stated {one:g}" for one in STATED), "jobs each", "price/h"]
    lines = []
    for arm in dict.fromkeys(one["arm"] for one in cells):
        for growth in GROWTHS:
            row = [one for one in cells if (one["arm"], one["growth"]) == (arm, growth)]
            told = f"grow by {growth:.0%}" if growth else "as profiled"
            kept = [f"{one['kept']:.2%}" for one in row]
            price = f"{sum(one['price_per_h'] for one in row) / len(row):.0f}"
            lines.append([arm, told, *kept, f"{row[0]['jobs']:,}", price])
    return markdown(head, lines)


def main(
    seeds: int = SEEDS, workers: int = 1, arms: Sequence[str] = tuple(ARMS), quick: bool = False
) -> dict[str, Any]:
    cells = [(arm, growth, stated) for arm in arms for growth in GROWTHS for stated in STATED]
    found: dict[Cell, list[dict[str, Any]]] = {cell: [] for cell in cells}
    with ProcessPoolExecutor(workers) as pool:
        for seed in range(1 if quick else seeds):
            for cell, one in zip(cells, pool.map(trace, [(c, seed) for c in cells]), strict=True):
                found[cell].append(one)
    rows = [summed(cell, traces) for cell, traces in found.items()]
    print(table(rows))
    return {"settings": SETTINGS, "cells": rows}


if __name__ == "__main__":
    bench(main, arms=ARMS)
