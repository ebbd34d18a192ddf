"""The shipped policy against the published one and the optimum; what each of its ideas is worth.

    python benchmarks/cluster_beyond.py --seeds 1                     # 10 minutes on a quiet core
    python benchmarks/cluster_beyond.py --arms 'rollmux,shipped'      # 5 minutes
    python benchmarks/cluster_beyond.py --quick

In the same simulation, restarts charged. An arm leaves one idea out, or has one alone.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from statistics import fmean
from typing import Any

from cluster_optimum import OptimumSimulation
from machine import ROOT, write_result
from msgspec import structs

from rollpacker.cluster.decide.cheapest_work import CheapestWork
from rollpacker.cluster.decide.forecast import Rest
from rollpacker.cluster.decide.job import ClusterJob, RoundTimes
from rollpacker.cluster.decide.placement import Choice, Policy, State
from rollpacker.cluster.sim import simulation as cluster
from rollpacker.cluster.sim.jobs import arrivals
from rollpacker.cluster.sim.policies import AsPublished
from rollpacker.cluster.sim.result import PolicyResult
from rollpacker.cluster.sim.spec import load_cluster

MIXED = ROOT / "configs/clusters/mixed.yaml"
PROFILES = ("balanced", "rollout-heavy", "train-heavy", "mixed")
SHIPPED = CheapestWork()
BARE = CheapestWork(
    orders=("round_robin",),
    saturate=False,
    moves=False,
    mends=False,
    learns=False,
    tail_release=False,
)
SEEDS = 3


@dataclasses.dataclass(frozen=True, slots=True)
class ForTheWorst(CheapestWork):
    """Promises for the longest iteration of every kind, as if every one were that long."""

    learns: bool = False

    def place(self, state: State, job: ClusterJob, *, rest: Rest | None = None) -> Choice | None:
        return CheapestWork.place(self, state, at_worst(job), rest=rest)

    def move(self, state: State, number: int, job: ClusterJob, *, rest: Rest) -> Choice | None:
        return CheapestWork.move(self, state, number, at_worst(job), rest=rest)


def at_worst(job: ClusterJob) -> ClusterJob:
    """With fixed iterations."""
    worst = job.worst
    rounds = RoundTimes(
        rollout_s=(worst.rollout_s,),
        train_s=(worst.train_s,),
        between_s=worst.between_s,
        after_s=worst.after_s,
    )
    return structs.replace(job, rounds=(rounds,))


ARMS: Mapping[str, Policy] = {
    "rollmux": AsPublished(),
    "shipped": SHIPPED,
    "without learning": dataclasses.replace(SHIPPED, learns=False),
    "without mending": dataclasses.replace(SHIPPED, mends=False),
    "for the worst case": ForTheWorst(),
    "without moves": dataclasses.replace(SHIPPED, moves=False),
    "round robin only": dataclasses.replace(SHIPPED, orders=("round_robin",)),
    "without saturation": dataclasses.replace(SHIPPED, saturate=False),
    "without tail release": dataclasses.replace(SHIPPED, tail_release=False),
    "price of work alone": BARE,
    "and moves": dataclasses.replace(BARE, moves=True),
    "and orders": dataclasses.replace(BARE, orders=SHIPPED.orders),
}


Work = tuple[str, str, tuple[str, ...]]
"""Profile, arm, settings."""


def run(work: Work) -> PolicyResult:
    """One simulation."""
    profile, arm, settings = work
    spec = load_cluster(MIXED, [f"jobs.profile={profile}", *settings])
    jobs = arrivals(spec)
    if arm == "optimum":
        return OptimumSimulation(spec, jobs).run(cluster.hours_alone(jobs))
    result = cluster.Simulation(spec, jobs, "rollpacker", chosen=ARMS[arm]).run()
    print(*work, f"{result.price_per_h:.1f} {result.slo_kept:.4f}", flush=True)
    return result


def rows_of(results: Mapping[str, PolicyResult]) -> dict[str, Any]:
    """By arm: price over the optimum, and SLOs kept, of one profile and seed."""
    optimum = results["optimum"].price_per_h
    return {
        arm: {
            "over_optimum": one.price_per_h / optimum,
            "slo_kept": one.slo_kept,
            "slowdown_mean": one.slowdown_mean,
        }
        for arm, one in results.items()
        if arm != "optimum"
    }


Seeds = Sequence[Mapping[str, Mapping[str, float]]]
"""By seed, then arm."""


def mean(seeds: Seeds, arm: str, what: str) -> float:
    """Over seeds."""
    return fmean(rows[arm][what] for rows in seeds)


def table(profiles: Mapping[str, Seeds]) -> str:
    """As docs/many-jobs-simulated.md has it: price over the optimum, and share of the SLOs kept,
    means over seeds; of the shipped policy also what it is cheaper than the published one, each
    seed's."""
    arms = [*next(iter(profiles.values()))[0]]
    lines = ["| profile | " + " | ".join(arms) + " |", "|---|" + "---|" * len(arms)]
    for profile, seeds in profiles.items():
        cells = [
            f"{mean(seeds, arm, 'over_optimum'):.2f}x, {mean(seeds, arm, 'slo_kept'):.1%}"
            for arm in arms
        ]
        if "shipped" in arms and "rollmux" in arms:
            less = [
                rows["shipped"]["over_optimum"] / rows["rollmux"]["over_optimum"] - 1
                for rows in seeds
            ]
            told = f"{fmean(less):+.1%}"
            if len(less) > 1:
                told += f"; {min(less):+.1%} to {max(less):+.1%}"
            cells[arms.index("shipped")] += f" ({told})"
        lines.append("| " + " | ".join([profile, *cells]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("settings", nargs="*", help="of the cluster, such as jobs.count=80")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--profiles", default=",".join(PROFILES))
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--name", default="cluster_beyond", help="of the result")
    parser.add_argument("--quick", action="store_true", help="40 jobs, nothing is written")
    args = parser.parse_args()
    arms, quick = args.arms.split(","), ["jobs.count=40", "jobs.hours=77"] if args.quick else []
    profiles: dict[str, list[dict[str, Any]]] = {one: [] for one in args.profiles.split(",")}
    with ProcessPoolExecutor(args.workers) as pool:
        for seed in range(1 if args.quick else args.seeds):
            settings = (*quick, *args.settings, f"seed={seed}")
            works = [(one, arm, settings) for one in profiles for arm in ("optimum", *arms)]
            results = dict(zip(works, pool.map(run, works), strict=True))
            for profile, rows in profiles.items():
                own = {arm: one for (other, arm, _), one in results.items() if other == profile}
                rows.append(rows_of(own))
            if not args.quick:  # after each seed: it may be stopped
                write_result(args.name, {"settings": args.settings, "profiles": profiles})
    print(table(profiles))


if __name__ == "__main__":
    main()
