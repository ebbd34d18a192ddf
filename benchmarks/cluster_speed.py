"""How long the cluster's decisions take, on one core (seconds of the processor).

    python benchmarks/cluster_speed.py               # a minute

Where a job goes that comes while 2,000 jobs are there, and whether each of those moves at its next
commit; the shipped policy on 300 jobs over 580 hours; the
exact optimum of 13 jobs, the hardest of some draws.
"""

from __future__ import annotations

import time
from typing import Any

from cluster_optimum import Columns, cheapest_partition
from lab import ROOT, bench

from rollpacker.cluster.decide.cheapest_work import CheapestWork
from rollpacker.cluster.decide.cluster import Cluster
from rollpacker.cluster.decide.events import Command, Committed, Ended, Event, Submitted
from rollpacker.cluster.sim.jobs import arrivals
from rollpacker.cluster.sim.simulation import Simulation
from rollpacker.cluster.sim.spec import load_cluster

MIXED = ROOT / "configs/clusters/mixed.yaml"
NUM_JOBS = 2_000
NUM_DECISIONS = 300
MANY_NODES = ("pools.0.nodes=4000", "pools.1.nodes=4000")


def decisions(num_jobs: int) -> dict[str, Any]:
    """Milliseconds of a decision: a job comes while so many are there, and goes again; then each
    commits, and may move. What is known of the groups is known before."""
    spec = load_cluster(MIXED, [*MANY_NODES, f"jobs.count={num_jobs + NUM_DECISIONS}"])
    jobs = [one.job for one in arrivals(spec)]
    cluster = Cluster(
        spec.core_pools(), CheapestWork(), link_gb_s=spec.link_gb_s, max_group=spec.max_group
    )
    began = time.process_time()
    for job in jobs[:num_jobs]:
        cluster.handle(Submitted(0.0, job))
    filled_s = time.process_time() - began
    for standing in cluster.state.groups.values():
        assert standing.summary
    placed_ms = []
    for job in jobs[num_jobs:]:
        placed_ms.append(_took_ms(cluster, Submitted(0.0, job))[0])
        cluster.handle(Ended(0.0, job.name))
    # All of those that are there look around after that, at their first commit.
    moved_ms, moves = [], 0
    for job in jobs[:num_jobs]:
        took_ms, commands = _took_ms(cluster, Committed(sum(job.mean), job.name, sum(job.mean)))
        moved_ms.append(took_ms)
        moves += bool(commands)
    return {
        "jobs": num_jobs,
        "groups": len(cluster.state.groups),
        "filled_cpu_s": filled_s,
        "a_job_comes": _spread(placed_ms),
        "a_job_commits": {"moves": moves, **_spread(moved_ms)},
    }


def _took_ms(cluster: Cluster, event: Event) -> tuple[float, list[Command]]:
    began = time.process_time()
    commands = cluster.handle(event)
    return (time.process_time() - began) * 1e3, commands


def _spread(took_ms: list[float]) -> dict[str, float]:
    took_ms = sorted(took_ms)
    return {
        "decisions": len(took_ms),
        "median_ms": took_ms[len(took_ms) // 2],
        "p99_ms": took_ms[int(0.99 * len(took_ms))],
        "worst_ms": took_ms[-1],
    }


def hardest_partition(num_jobs: int, seeds: int) -> dict[str, Any]:
    """Processor seconds of the exact optimum of so many jobs, in the settings that leave most
    groups feasible."""
    worst_s, columns = 0.0, 0
    for seed in range(seeds):
        for profile in ("balanced", "mixed", "rollout-heavy", "train-heavy"):
            settings = [f"seed={seed}", f"jobs.count={num_jobs}", f"jobs.profile={profile}"]
            settings += [f"pools.{n}.host_memory_gib=10000" for n in (0, 1)]
            spec = load_cluster(MIXED, [*settings, "jobs.slo=[2.0,2.0]"])
            jobs = [one.job for one in arrivals(spec)]
            began = time.process_time()
            found = Columns(spec).of(jobs)
            cheapest_partition([one.name for one in jobs], found)
            worst_s = max(worst_s, time.process_time() - began)
            columns = max(columns, len(found))
    return {
        "jobs": num_jobs,
        "draws": seeds * 4,
        "feasible_groups": columns,
        "worst_cpu_s": worst_s,
    }


def main(jobs: int = NUM_JOBS) -> dict[str, Any]:
    payload: dict[str, Any] = {"optimum": hardest_partition(13, 5), "decision": decisions(jobs)}
    spec = load_cluster(MIXED)
    coming = arrivals(spec)
    began = time.process_time()
    Simulation(spec, coming, "rollpacker").run()
    return payload | {"simulation_300_jobs_580_h_cpu_s": time.process_time() - began}


if __name__ == "__main__":
    bench(main)
