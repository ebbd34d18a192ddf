"""`rollpacker cluster simulate FILE [key=value ...]`: jobs on two pools, in virtual time."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollpacker.sim.cluster_jobs import Arrival
    from rollpacker.sim.cluster_result import PolicyResult
    from rollpacker.sim.cluster_spec import ClusterSpec


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "cluster",
        help="several jobs that fill each other's waits on two pools",
        description="Several training jobs share a rollout pool and a training pool: one generates "
        "while another trains.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    simulate = actions.add_parser(
        "simulate",
        help="what a placement policy would cost, and whom it would slow down",
        description="Has jobs come to the pools of FILE, in virtual time, through the decisions of "
        "the cluster's core, and prints what that costs.",
        epilog="docs/many-jobs.md says what is modelled.",
    )
    simulate.add_argument("cluster", metavar="FILE", help="YAML file, as in configs/clusters")
    simulate.add_argument(
        "overrides", nargs="*", default=(), metavar="key=value", help="replace single settings"
    )
    simulate.add_argument(
        "--compare",
        metavar="NAME,...",
        help="these policies on the same jobs: rollpacker, dedicated, colocated, rollmux, random, "
        "most_idle, optimum",
    )
    simulate.add_argument("--json", action="store_true", help="print JSON and nothing else")


def run(args: argparse.Namespace) -> int:
    """Simulate, and return the exit code. Raises `ValueError` for what the user got wrong."""
    from rollpacker.sim.cluster_jobs import arrivals
    from rollpacker.sim.cluster_spec import load_cluster

    names = _names(args.compare)
    spec = load_cluster(args.cluster, args.overrides)
    jobs = arrivals(spec)
    _check(spec, jobs)
    results = _simulate_all(spec, jobs, names, told=not args.json)
    if args.json:
        _print_json(results)
        return 0
    from rollpacker.sim.cluster_table import explain, render

    print(f"{spec.name}: {len(jobs):,} job{'s' if len(jobs) > 1 else ''}\n")
    print(f"{render(results)}\n\n{explain(results)}")
    return 0


def _names(text: str | None) -> list[str]:
    """The policies of --compare, each once."""
    from rollpacker.config.document import nearest
    from rollpacker.sim.cluster_policies import POLICIES, SHIPPED

    if text is None:
        return [SHIPPED]
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in POLICIES:
            raise ValueError(
                f'--compare: there is no policy "{name}". Known: {", ".join(POLICIES)}.'
                f"{nearest(name, POLICIES)}"
            )
    return names


def _check(spec: ClusterSpec, jobs: Sequence[Arrival]) -> None:
    """Before anything runs: whether each job fits somewhere."""
    from rollpacker.core.coexecution.nodes import check_job

    pools = spec.core_pools()
    for one in jobs:
        check_job(one.job, pools)


def _simulate_all(
    spec: ClusterSpec, jobs: Sequence[Arrival], names: Sequence[str], *, told: bool
) -> dict[str, PolicyResult]:
    """By policy, in the order given."""
    from rollpacker.sim.cluster import Simulation, hours_alone
    from rollpacker.sim.cluster_optimum import OptimumSimulation

    results: dict[str, PolicyResult] = {}
    for name in names:
        with _progress(name, len(jobs), told=told) as tell:
            if name == "optimum":
                results[name] = OptimumSimulation(spec, jobs).run(hours_alone(jobs), tell)
            else:
                results[name] = Simulation(spec, jobs, name).run(tell)
    return results


def _progress(
    name: str, count: int, *, told: bool
) -> AbstractContextManager[Callable[[int], None]]:
    """Jobs that have ended: a bar on a terminal, else a line now and then; with --json none."""
    if not told:
        return nullcontext(lambda done: None)
    from rollpacker.cli.output import progress

    return progress(f"{name}, jobs ended", count)


def _print_json(results: Mapping[str, PolicyResult]) -> None:
    import json

    optimum = results.get("optimum")
    plain = {"policies": {name: one.to_plain(optimum) for name, one in results.items()}}
    print(json.dumps(plain, indent=1, allow_nan=False))
