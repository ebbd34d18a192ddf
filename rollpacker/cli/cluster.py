"""`rollpacker cluster ACTION ...`: jobs that share two pools of devices, really or in virtual time.
What the actions do is in `rollpacker/cluster/commands/`; only `simulate` is here."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from rollpacker.cli.arguments import add_overrides, compared

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollpacker.cluster.sim.jobs import Arrival
    from rollpacker.cluster.sim.result import PolicyResult
    from rollpacker.cluster.sim.spec import ClusterSpec


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
        epilog="docs/many-jobs-simulated.md says what is modelled.",
    )
    _add_file(simulate)
    simulate.add_argument(
        "--compare",
        metavar="NAME,...",
        help="these policies on the same jobs: rollpacker, dedicated, colocated, rollmux, random, "
        "most_idle",
    )
    simulate.add_argument("--json", action="store_true", help="print JSON and nothing else")

    _add_serving(actions)


def _add_serving(actions: Any) -> None:
    serve = actions.add_parser(
        "serve",
        help="start jobs on the pools of FILE, and let them take turns",
        description="Serves the pools of FILE until Ctrl-C, on the ray cluster that there is, or "
        "else on one that it starts here. Jobs outlive it: start it again, and it goes on.",
        epilog="docs/many-jobs.md says what it needs.",
    )
    _add_file(serve)
    serve.add_argument(
        "--folder", help="what it remembers, on a disk of this host (default: runs/NAME-cluster)"
    )
    serve.add_argument(
        "--local", action="store_true", help="without ray: jobs are processes of this host"
    )
    submit = _add_submit(actions)
    jobs = actions.add_parser("jobs", help="who is there")
    show = actions.add_parser("show", help="all about one job")
    top = actions.add_parser("top", help="the cluster, live; Ctrl-C ends it")
    cancel = actions.add_parser("cancel", help="end a job, at its next commit")
    drain = actions.add_parser("drain", help="take a node out: its jobs move at their next commit")
    for one in (show, cancel):
        one.add_argument("job", metavar="JOB")
    drain.add_argument("node", metavar="NODE", help="POOL/NUMBER, as jobs shows it")
    drain.add_argument("--restore", action="store_true", help="let it have jobs again")
    cancel.add_argument("--now", action="store_true", help="at once, back to its last commit")
    for one in (submit, jobs, show, top, cancel, drain):
        one.add_argument(
            "--cluster",
            metavar="FOLDER",
            help="of the service (default: ROLLPACKER_CLUSTER, or the only one served from runs/)",
        )
    for one in (submit, jobs, show, top):
        one.add_argument("--json", action="store_true", help="print JSON and nothing else")


def _add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="YAML file, as in configs/clusters")
    add_overrides(parser)


def _add_submit(actions: Any) -> argparse.ArgumentParser:
    submit = actions.add_parser(
        "submit",
        help="hand in a run",
        description="Checks a run's config and hands it in; it starts once there are nodes. Or a "
        "program that takes its turns by rollpacker.cluster.phase.",
    )
    submit.add_argument("config", metavar="RUN.yaml", help="as for rollpacker train; or PROGRAM.py")
    add_overrides(submit)
    submit.add_argument(
        "--slo", type=float, default=1.5, help="how many times as long it may take (default: 1.5)"
    )
    submit.add_argument("--profile", metavar="RUN", help="folder of a run like it, for its seconds")
    submit.add_argument(
        "--phases", metavar="ROLLOUT,TRAIN", help="mean seconds of both, instead of a profile"
    )
    program = submit.add_argument_group("of a program")
    program.add_argument("--arguments", default="", help="that it is given, as a shell reads them")
    program.add_argument("--name", help="of the job (default: the program's)")
    program.add_argument("--steps", type=int, help="iterations that it makes")
    program.add_argument(
        "--devices", metavar="ROLLOUT,TRAIN", help="how many of each pool (default: 1,1)"
    )
    program.add_argument(
        "--memory-gib", type=float, default=0.0, help="host memory that it keeps on a node, parked"
    )
    submit.add_argument("--priority", type=int, default=0, help="higher ones come first")
    submit.add_argument("--owner", help="whose quota it counts against (default: you)")
    assert isinstance(submit, argparse.ArgumentParser)
    return submit


def run(args: argparse.Namespace) -> int:
    """Run the action in `args`; returns the exit code. Raises `ValueError` for a mistake."""
    if args.action == "simulate":
        return _simulate(args)
    if args.action == "serve":
        from rollpacker.cluster.commands import serve as cluster_serve

        return cluster_serve.run(args)
    if args.action == "submit":
        from rollpacker.cluster.commands import submit as cluster_submit

        return cluster_submit.run(args)
    from rollpacker.cluster.commands import show as cluster_show

    return cluster_show.run(args)


def _simulate(args: argparse.Namespace) -> int:
    from rollpacker.cluster.sim.jobs import arrivals
    from rollpacker.cluster.sim.policies import POLICIES, SHIPPED
    from rollpacker.cluster.sim.spec import load_cluster

    names = [SHIPPED] if args.compare is None else compared(args.compare, POLICIES, "policy")
    spec = load_cluster(args.file, args.overrides)
    jobs = arrivals(spec)
    _check(spec, jobs)
    results = _simulate_all(spec, jobs, names, told=not args.json)
    if args.json:
        _print_json(results)
        return 0
    from rollpacker.cluster.sim.result import explain, render

    print(f"{spec.name}: {len(jobs):,} job{'s' if len(jobs) > 1 else ''}\n")
    print(f"{render(results)}\n\n{explain(results)}")
    return 0


def _check(spec: ClusterSpec, jobs: Sequence[Arrival]) -> None:
    """Check, before anything is simulated, that every job fits into the pools of devices."""
    from rollpacker.cluster.decide.nodes import check_job

    pools = spec.core_pools()
    for one in jobs:
        check_job(one.job, pools)


def _simulate_all(
    spec: ClusterSpec, jobs: Sequence[Arrival], names: Sequence[str], *, told: bool
) -> dict[str, PolicyResult]:
    from rollpacker.cluster.sim.simulation import Simulation

    results: dict[str, PolicyResult] = {}
    for name in names:
        with _progress(name, len(jobs), told=told) as tell:
            results[name] = Simulation(spec, jobs, name).run(tell)
    return results


def _progress(
    name: str, count: int, *, told: bool
) -> AbstractContextManager[Callable[[int], None]]:
    """Returns a context with a function to call with the number of ended jobs. The context shows it
    as a bar on a terminal, else as a line now and then, and nothing unless `told`."""
    if not told:
        return nullcontext(lambda done: None)
    from rollpacker.run.output import progress

    return progress(f"{name}, jobs ended", count)


def _print_json(results: Mapping[str, PolicyResult]) -> None:
    import json

    plain = {"policies": {name: one.to_plain() for name, one in results.items()}}
    print(json.dumps(plain, indent=1, allow_nan=False))
