"""What the published policy would cost over the optimum, predicted before it is compared.

    python benchmarks/cluster_held_out.py            # three seeds, 6 minutes each on a quiet core
    python benchmarks/cluster_held_out.py --quick    # one seed of 30 jobs, nothing is written

By profile, SLO and group cap: price over the optimum and share of SLOs kept, of `rollmux`, `random`
and `most_idle`. The published table was not looked at. What is assumed stands in
docs/many-jobs-simulated.md.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from cluster_optimum import OptimumSimulation
from lab import ROOT, bench, markdown

from rollpacker.cluster.sim.jobs import arrivals
from rollpacker.cluster.sim.simulation import Simulation, hours_alone
from rollpacker.cluster.sim.spec import load_cluster

MIXED = ROOT / "configs/clusters/mixed.yaml"
PROFILES = ("balanced", "rollout-heavy", "train-heavy", "mixed")
SLOS = {"1.2": "[1.2,1.2]", "1.5": "[1.5,1.5]", "2.0": "[2.0,2.0]", "1 to 2": "[1.0,2.0]"}
CAPS = (2, 3, 4, 5)
POLICIES = ("rollmux", "random", "most_idle")
CELLS = [(profile, slo, cap) for profile in PROFILES for slo in SLOS for cap in CAPS]
QUICK = ("jobs.count=30", "jobs.hours=60")


def cell(profile: str, slo: str, cap: int, seed: int, *settings: str) -> dict[str, Any]:
    """One cell of the tables at one seed."""
    overrides = [f"jobs.profile={profile}", f"jobs.slo={SLOS[slo]}", f"max_group={cap}"]
    spec = load_cluster(MIXED, [*overrides, f"seed={seed}", *settings])
    jobs = arrivals(spec)
    began = time.process_time()
    optimum = OptimumSimulation(spec, jobs).run(hours_alone(jobs))
    row: dict[str, Any] = {
        "profile": profile,
        "slo": slo,
        "max_group": cap,
        "seed": seed,
        "optimum_price_per_h": optimum.price_per_h,
        "optimum_cpu_s": round(time.process_time() - began, 1),
    }
    for name in POLICIES:
        found = Simulation(spec, jobs, name).run()
        row[name] = {
            "over_optimum": found.price_per_h / optimum.price_per_h,
            "slo_kept": found.slo_kept,
        }
    return row


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """As docs/many-jobs-simulated.md has it: one table for each policy, a column for each group
    cap; means of the seeds, and half of what they differ."""
    tables = []
    for name in POLICIES:
        lines = []
        for profile, slo in itertools.product(PROFILES, SLOS):
            cells = [
                _cell([r[name] for r in rows if where(r) == (profile, slo, cap)]) for cap in CAPS
            ]
            lines.append([profile, slo, *cells])
        caps = (f"at most {cap}" for cap in CAPS)
        tables.append(markdown([f"`{name}`: profile", "SLO", *caps], lines))
    return "\n\n".join(tables)


def where(row: Mapping[str, Any]) -> tuple[str, str, int]:
    """The cell that a row is of."""
    return row["profile"], row["slo"], row["max_group"]


def _cell(found: Sequence[Mapping[str, float]]) -> str:
    prices = [one["over_optimum"] for one in found]
    kept = [100 * one["slo_kept"] for one in found]
    return f"{_spread(prices, 2)}x, {_spread(kept, 0)}%"


def _spread(values: Sequence[float], digits: int) -> str:
    half = (max(values) - min(values)) / 2
    return f"{statistics.fmean(values):.{digits}f} ± {half:.{digits}f}"


def main(*settings: str, seeds: int = 3, quick: bool = False) -> dict[str, Any]:
    own = [*(QUICK if quick else ()), *settings]
    count = 1 if quick else seeds
    rows = []
    for seed in range(count):
        for profile, slo, cap in CELLS:
            rows.append(cell(profile, slo, cap, seed, *own))
            print(rows[-1], flush=True)
    print(table(rows))
    return {"num_seeds": count, "rows": rows}


if __name__ == "__main__":
    bench(main)
