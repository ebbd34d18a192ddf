"""The shipped policy against the published one and the optimum; what each of its ideas is worth.

    python benchmarks/cluster_beyond.py              # 8 minutes on a quiet core
    python benchmarks/cluster_beyond.py --arms 'rollmux,shipped,without moves'    # 2 minutes

In the same simulation, restarts charged. An arm leaves one idea out, or has one alone.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from machine import ROOT, write_result

from rollpacker.core.coexecution.cheapest_work import CheapestWork
from rollpacker.core.coexecution.placement import Policy
from rollpacker.core.coexecution.published import AsPublished
from rollpacker.sim import cluster
from rollpacker.sim.cluster_jobs import Arrival, arrivals
from rollpacker.sim.cluster_optimum import OptimumSimulation
from rollpacker.sim.cluster_result import PolicyResult
from rollpacker.sim.cluster_spec import ClusterSpec, load_cluster

MIXED = ROOT / "configs/clusters/mixed.yaml"
PROFILES = ("balanced", "rollout-heavy", "train-heavy", "mixed")
SHIPPED = CheapestWork()
BARE = CheapestWork(orders=("round_robin",), saturate=False, moves=False, tail_release=False)
ARMS: Mapping[str, Policy] = {
    "rollmux": AsPublished(),
    "shipped": SHIPPED,
    "without moves": dataclasses.replace(SHIPPED, moves=False),
    "without orders": dataclasses.replace(SHIPPED, orders=("round_robin",)),
    "without saturation": dataclasses.replace(SHIPPED, saturate=False),
    "without tail release": dataclasses.replace(SHIPPED, tail_release=False),
    "price of work alone": BARE,
    "and moves": dataclasses.replace(BARE, moves=True),
    "and orders": dataclasses.replace(BARE, orders=SHIPPED.orders),
}


def run(spec: ClusterSpec, jobs: Sequence[Arrival], policy: Policy) -> PolicyResult:
    """The simulation with this policy."""
    simulation = cluster.Simulation(spec, jobs, "rollpacker", chosen=policy)
    return simulation.run()


def profile_rows(profile: str, arms: Sequence[str], settings: Sequence[str]) -> dict[str, Any]:
    """By arm: price over the optimum, and SLOs kept."""
    spec = load_cluster(MIXED, [f"jobs.profile={profile}", *settings])
    jobs = arrivals(spec)
    optimum = OptimumSimulation(spec, jobs).run(cluster.hours_alone(jobs)).price_per_h
    rows: dict[str, Any] = {}
    for name in arms:
        found = run(spec, jobs, ARMS[name])
        rows[name] = {
            "over_optimum": found.price_per_h / optimum,
            "slo_kept": found.slo_kept,
            "slowdown_mean": found.slowdown_mean,
        }
        print(profile, name, rows[name], flush=True)
    return rows


def table(profiles: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """As docs/many-jobs.md has it: price over the optimum, and share of the SLOs kept; of the
    shipped policy also what it is cheaper than the published one."""
    arms = [*next(iter(profiles.values()))]
    lines = ["| profile | " + " | ".join(arms) + " |", "|---|" + "---|" * len(arms)]
    for profile, rows in profiles.items():
        cells = [f"{row['over_optimum']:.2f}x, {row['slo_kept']:.1%}" for row in rows.values()]
        if "shipped" in rows and "rollmux" in rows:
            less = rows["shipped"]["over_optimum"] / rows["rollmux"]["over_optimum"] - 1
            cells[arms.index("shipped")] += f" ({less:+.0%})"
        lines.append("| " + " | ".join([profile, *cells]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("settings", nargs="*", help="of the cluster, such as jobs.count=80")
    parser.add_argument("--arms", default=",".join(ARMS))
    args = parser.parse_args()
    arms = args.arms.split(",")
    rows = {profile: profile_rows(profile, arms, args.settings) for profile in PROFILES}
    write_result("cluster_beyond", {"settings": args.settings, "profiles": rows})
    print(table(rows))


if __name__ == "__main__":
    main()
