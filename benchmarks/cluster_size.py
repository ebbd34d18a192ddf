"""Eight jobs of fake speed on 4 + 2 nodes: real controllers, the service, made-up engines and
trainers (`paced_job.py`).

Each job runs alone first (all at once, each on nodes of its own: they only sleep), which gives its
phases. Then all share four rollout nodes and two training nodes; the shipped policy places them.
What is compared, over the time in which all eight run: each job's slowdown with the forecast of its
group, made from the phases alone (asked: within 5 %), and its period with the forecast one: what
the service and switches add to it (2 %).

    python benchmarks/cluster_size.py [--steps 40] [--quick] [--ray]

With `--ray` all of it is behind ray, on six hosts that are namespaces of this machine (Linux, as
root; the packages of `make cluster`): mailbox, wardens, jobs and what they say to each other. Where
each job runs alone, no ray is there: its phases are the same.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from statistics import fmean, median
from typing import Any

from cluster_lab import ROOT, Told, connect_to_ray, new_cluster, read, serving, submit
from lab import bench, write_result

from rollpacker.cluster.decide import cluster as core
from rollpacker.cluster.decide.forecast import Forecast, foresee
from rollpacker.cluster.decide.job import ClusterJob, RoundTimes
from rollpacker.cluster.service.store import Store
from rollpacker.codec import from_plain

PACED = Path(__file__).parent / "paced_job.py"
JOBS = {
    f"job-{number}": {"rollout_s": 2.4 + 0.15 * number, "train_s": 0.5 + 0.04 * (7 - number)}
    for number in range(8)
}
"""Rollout-heavy, of like length, all of them other ones."""
NODES = (4, 2)
"""Of rollout and of training."""
SLO = 2.0
WARM_UP = 3
COLD_S = 30.0
"""What a move is said to cost: none pays for it here."""


def main(steps: int = 40, quick: bool = False, ray: bool = False, inside: bool = False) -> None:
    if ray and not inside:
        sys.exit(on_hosts())
    steps = 12 if quick else steps
    if ray:
        connect_to_ray()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        alone = run(Path(scratch) / "alone", dict.fromkeys(JOBS), 8, (8, 8), on_ray=False)
        profiles = {name: profile(told) for name, told in alone.items()}
        folder = Path(scratch) / "shared"
        shared = run(folder, profiles, steps, NODES, on_ray=ray)
        forecasts = forecast(folder, NODES)
    result = compare(shared, forecasts)
    print(json.dumps(result, indent=1))
    if not quick:
        write_result("cluster_size_ray" if ray else "cluster_size", result)


def on_hosts() -> int:
    """Run this very command on the first of six hosts, one for each node. Returns its exit code."""
    from tests.cluster.netns import Network, why_impossible

    if why := why_impossible():
        raise SystemExit(why)
    pools = ["train"] * NODES[1] + ["rollout"] * NODES[0]
    with Network(len(pools), cores=1) as network:
        for host, pool in enumerate(pools):
            network.start_ray([host], resources={f"pool_{pool}": 1})
        environ = {**network.environment, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, *sys.argv, "--inside"]
        return network.popen(0, command, env=environ).wait()


def run(
    folder: Path,
    profiles: dict[str, RoundTimes | None],
    steps: int,
    nodes: tuple[int, int],
    *,
    on_ray: bool,
) -> dict[str, Told]:
    """Have all jobs run on so many nodes. Without a profile a job is one that shares nothing."""
    with serving(folder, nodes, on_ray=on_ray) as mailbox:
        for name, times in profiles.items():
            rounds = times or RoundTimes(rollout_s=(1.0,), train_s=(1.0,))
            job = ClusterJob(
                name=name,
                rounds=(rounds,),
                steps=steps,
                slo=1.0 if times is None else SLO,
                rollout_devices=1,
                train_devices=1,
                cold_start_s=COLD_S,
            )
            seconds = [
                f"--rollout-s={JOBS[name]['rollout_s']}",
                f"--train-s={JOBS[name]['train_s']}",
            ]
            own = folder / "runs" / name
            command = [str(PACED), str(own), *seconds, f"--steps={steps}"]
            submit(folder, job, command, mailbox)
    return {name: read(folder, name, folder / "runs" / name / "events.jsonl") for name in profiles}


def profile(told: Told) -> RoundTimes:
    """Phases as they were alone."""
    times = told.times[WARM_UP:]
    return RoundTimes(
        rollout_s=tuple(one.rollout_s for one in times),
        train_s=tuple(one.train_s for one in times),
        between_s=fmean(one.between_s for one in times),
        after_s=fmean(one.after_s for one in times),
    )


def forecast(folder: Path, nodes: tuple[int, int]) -> dict[str, Forecast]:
    """Of each job in its group, as the groups were once all jobs were placed: the service's own
    events, given to a fresh core."""
    cluster, found = new_cluster(nodes), dict[str, Forecast]()
    store = Store(folder / "events.db")
    for entry in store.entries():
        kind = entry.event["kind"]
        if kind == "Ended":
            break
        cluster.handle(from_plain(getattr(core, kind), entry.event["event"]))
    store.close()
    for standing in cluster.state.groups.values():
        forecasts = foresee(standing.layout, standing.order)
        for job, one in zip(standing.layout.jobs, forecasts, strict=True):
            found[job.name] = one
    return found


def compare(shared: dict[str, Told], forecasts: dict[str, Forecast]) -> dict[str, Any]:
    """Over the time in which all jobs run."""
    begin_s = max(told.commits_s[WARM_UP - 1] for told in shared.values())
    end_s = min(told.commits_s[-1] for told in shared.values())
    jobs, overheads = {}, []
    for name, told in shared.items():
        inside = [n for n, at in enumerate(told.commits_s) if begin_s <= at <= end_s]
        first, last = inside[0], inside[-1]
        elapsed_s = told.commits_s[last] - told.commits_s[first]
        waited_s = sum(told.waits_s[first + 1 : last + 1])
        slowdown = elapsed_s / (elapsed_s - waited_s)
        period_s = elapsed_s / (last - first)
        expected = forecasts[name]
        jobs[name] = {
            "iterations": last - first,
            "period_s": period_s,
            "period_over_forecast": period_s / expected.iteration_s,
            "slowdown": slowdown,
            "forecast": expected.slowdown,
            "slowdown_over_forecast": slowdown / expected.slowdown,
        }
        overheads.append(period_s / expected.iteration_s - 1)
    return {
        "slo": SLO,
        "jobs": jobs,
        "worst_over_forecast": max(abs(one["slowdown_over_forecast"] - 1) for one in jobs.values()),
        "overhead": median(overheads),
    }


if __name__ == "__main__":
    bench(main)
