"""The shipped policy against the published one and the optimum; what each of its ideas is worth.

    python benchmarks/cluster_beyond.py --seeds 1                     # 10 minutes on a quiet core
    python benchmarks/cluster_beyond.py --arms rollmux shipped        # 5 minutes
    python benchmarks/cluster_beyond.py --quick

In the same simulation, restarts charged. An arm leaves one idea out, or has one alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from statistics import fmean
from typing import Any

from cluster_optimum import OptimumSimulation
from lab import ROOT, bench, markdown
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
"""Rows of numbers for each seed, by arm."""


def mean(seeds: Seeds, arm: str, what: str) -> float:
    """Over seeds."""
    return fmean(rows[arm][what] for rows in seeds)


def table(profiles: Mapping[str, Seeds]) -> str:
    """As docs/many-jobs-simulated.md has it: price over the optimum, and share of the SLOs kept,
    means over seeds; of the shipped policy also what it is cheaper than the published one, each
    seed's."""
    arms = [*next(iter(profiles.values()))[0]]
    lines = []
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
        lines.append([profile, *cells])
    return markdown(["profile", *arms], lines)


def main(
    *settings: str,
    arms: Sequence[str] = tuple(ARMS),
    profiles: Sequence[str] = PROFILES,
    workers: int = 1,
    seeds: int = SEEDS,
    quick: bool = False,
) -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {one: [] for one in profiles}
    few = ("jobs.count=40", "jobs.hours=77") if quick else ()
    with ProcessPoolExecutor(workers) as pool:
        for seed in range(1 if quick else seeds):
            own = (*few, *settings, f"seed={seed}")
            works = [(one, arm, own) for one in found for arm in ("optimum", *arms)]
            results = dict(zip(works, pool.map(run, works), strict=True))
            for profile, rows in found.items():
                rows.append(rows_of({a: r for (p, a, _), r in results.items() if p == profile}))
    print(table(found))
    return {"settings": settings, "profiles": found}


if __name__ == "__main__":
    bench(main, arms=ARMS, profiles=PROFILES)
