"""What the published policy would cost over the optimum, predicted before it is compared.

    python benchmarks/cluster_held_out.py            # about 10 minutes

By profile, SLO and group cap: price over the optimum and share of SLOs kept, of `rollmux`, `random`
and `most_idle`. The published table was not looked at. What is assumed stands in docs/many-jobs.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any

from machine import ROOT, write_result

from rollpacker.sim.cluster import Simulation, hours_alone
from rollpacker.sim.cluster_jobs import arrivals
from rollpacker.sim.cluster_optimum import OptimumSimulation
from rollpacker.sim.cluster_spec import load_cluster

MIXED = ROOT / "configs/clusters/mixed.yaml"
PROFILES = ("balanced", "rollout-heavy", "train-heavy", "mixed")
SLOS = {"1.2": "[1.2,1.2]", "1.5": "[1.5,1.5]", "2.0": "[2.0,2.0]", "1 to 2": "[1.0,2.0]"}
POLICIES = ("rollmux", "random", "most_idle")
CELLS = [
    *((profile, slo, 5) for profile in PROFILES for slo in SLOS),
    *((profile, "1 to 2", cap) for profile in PROFILES for cap in (2, 3, 4)),
]


def cell(profile: str, slo: str, cap: int, *settings: str) -> dict[str, Any]:
    """One row of the table."""
    overrides = [f"jobs.profile={profile}", f"jobs.slo={SLOS[slo]}", f"max_group={cap}", *settings]
    spec = load_cluster(MIXED, overrides)
    jobs = arrivals(spec)
    began = time.process_time()
    optimum = OptimumSimulation(spec, jobs).run(hours_alone(jobs))
    row: dict[str, Any] = {
        "profile": profile,
        "slo": slo,
        "max_group": cap,
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
    """As docs/many-jobs.md has it: price over the optimum, and share of the SLOs kept."""
    lines = [
        "| profile | SLO | max_group | " + " | ".join(f"`{name}`" for name in POLICIES) + " |",
        "|---|---|---|" + "---|" * len(POLICIES),
    ]
    for row in rows:
        cells = [
            f"{row[name]['over_optimum']:.2f}x, {row[name]['slo_kept']:.0%}" for name in POLICIES
        ]
        head = [row["profile"], row["slo"], str(row["max_group"])]
        lines.append("| " + " | ".join(head + cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("settings", nargs="*", help="of the cluster, such as jobs.count=30")
    args = parser.parse_args()
    rows = []
    for profile, slo, cap in CELLS:
        rows.append(cell(profile, slo, cap, *args.settings))
        print(rows[-1], flush=True)
    if not args.settings:
        write_result("cluster_held_out", {"rows": rows})
        print(table(rows))


if __name__ == "__main__":
    main()
