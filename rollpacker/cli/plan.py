"""`rollpacker plan SCENARIO|RUN`: finds the fastest settings by simulation, with reasons."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollpacker.cli.arguments import add_overrides, check_file, check_jobs
from rollpacker.cli.schedule import add_csv, write_schedule

if TYPE_CHECKING:
    from rollpacker.cluster.sim.spec import ClusterSpec
    from rollpacker.config.schema import RunConfig
    from rollpacker.sim import plan as planning
    from rollpacker.sim.plan_ideas import Base, Evaluate
    from rollpacker.sim.plan_result import Plan
    from rollpacker.sim.plan_run import AsMeasured
    from rollpacker.sim.scenario import Scenario
    from rollpacker.sim.whatif import RunModel

LINE_EVERY_S = 10.0
"""Minimum seconds between two lines of progress, printed where there is no terminal."""
LONG_S = 300.0
"""If the plan takes more than this many further seconds, a hint says what takes less time."""
_EXAMPLES = """\
examples:
  rollpacker plan configs/scenarios/14b-16k.yaml
  rollpacker plan configs/scenarios/14b-16k.yaml --max-shift 0.2 --write faster.yaml
  rollpacker plan runs/quickstart --budget quick      for the machine that this run was made on
  rollpacker plan configs/scenarios/14b-16k.yaml --shared configs/clusters/mixed.yaml
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="search for the fastest settings, by simulation",
        description="Searches factors, tiers and switches for the shortest mean step time, under a "
        "bound on how much shorter the trained responses are than the policy's own. Everything "
        "that is tried is on-policy and part of this package. Nothing of the target is changed.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", metavar="TARGET", help="a scenario's YAML file or a run's folder")
    add_overrides(parser, "changes to the current settings")
    parser.add_argument(
        "--max-shift",
        metavar="SHARE",
        type=float,
        help="trained responses may be shorter by this share on average, such as 0.2 (default: "
        "tail_batching.max_length_shift, longer or shorter, with selection=none; else as much as "
        "at the current settings; with tail_batching.debias the bound is on the shift after the "
        "correction, which leaves none)",
    )
    parser.add_argument(
        "--budget",
        choices=("quick", "normal", "thorough"),
        default="normal",
        help="how much is simulated (default %(default)s)",
    )
    parser.add_argument(
        "--shared",
        metavar="FILE",
        help="a cluster's file, as in configs/clusters: search for the lowest price of its pools "
        "while the job holds them, instead of the shortest step",
    )
    parser.add_argument("--jobs", metavar="N", type=int, help="processes (default: one a core)")
    parser.add_argument("--write", metavar="FILE", help="write the best setting as a config")
    add_csv(parser)
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")


def run(args: argparse.Namespace) -> int:
    """Print the best settings; returns the exit code. Raises `ValueError` for a user's mistake."""
    from rollpacker.run.driving import ending_as_interrupt

    with ending_as_interrupt():  # so that the processes end as well
        return _run(args) if args.csv is None else write_schedule(args)


def _run(args: argparse.Namespace) -> int:
    import dataclasses
    import json

    from rollpacker.cli.plan_text import explain, ranking, trust
    from rollpacker.config.load import save_config
    from rollpacker.config.schema import RunConfig
    from rollpacker.run import output
    from rollpacker.run.error_messages import naming
    from rollpacker.sim import plan as planning
    from rollpacker.sim import plan_ideas
    from rollpacker.sim.plan_run import RunEvaluate, as_measured, measured_base
    from rollpacker.sim.whatif import load_run

    _check_numbers(args)
    shared = _shared(args.shared)
    budget = planning.BUDGETS[args.budget]
    out = _checked_out(args.write)
    config: Scenario | RunConfig
    evaluate: plan_ideas.Evaluate
    model: RunModel | None = None
    real: AsMeasured | None = None
    if Path(args.target).suffix in (".yaml", ".yml"):
        config = _scenario(args, shared)
        base, evaluate = plan_ideas.plan_base(config), plan_ideas.ScenarioEvaluate(scenario=config)
    else:
        model = load_run(args.target)
        config = _run_config(args, model, shared)
        real = as_measured(model)
        base = measured_base(config, model, real)
        evaluate = RunEvaluate(model=model, config=config)
        budget = evaluate.budget(budget)
    found = _search(args, _priced(base, config, shared), evaluate, budget)
    best = plan_ideas.changed(config, found.best.candidate.changes)
    console = output.console()
    if args.json:
        print(json.dumps(_to_plain(args.target, found, real), allow_nan=False))
    else:
        corrected = config.tail_batching.debias != "none"
        console.print(ranking(found, real))
        outside = _outside(args, config, model, found, best)
        off = [] if real is None else trust(found, real)
        for line in [*explain(found, corrected=corrected), *off, outside]:
            console.print(line, soft_wrap=True, markup=False, highlight=False)
    if out is not None:  # last, so that a full disk does not cost the results
        if isinstance(best, RunConfig):  # a folder of the run's own name is there already
            best = dataclasses.replace(best, name=f"{best.name}-planned")
        with naming(out.parent):
            save_config(best, out, comment=_comment(args.target, found))
        if not args.json:
            console.print(f"\nWrote {out}.", soft_wrap=True, markup=False, highlight=False)
    return 0


def _shared(name: str | None) -> ClusterSpec | None:
    """The cluster in the file that the option --shared names. None without the option."""
    from rollpacker.cluster.sim.spec import load_cluster

    return None if name is None else load_cluster(name)


def _scenario(args: argparse.Namespace, shared: ClusterSpec | None) -> Scenario:
    from rollpacker.cluster.sim.profiles import on_pools
    from rollpacker.sim.scenario import load_scenario

    scenario = load_scenario(args.target, args.overrides)
    return scenario if shared is None else on_pools(scenario, shared.pools)


def _run_config(args: argparse.Namespace, model: RunModel, shared: ClusterSpec | None) -> RunConfig:
    """Returns the run's config with the overrides. If pools of devices are `shared`, no gradients
    are computed while a round goes on. Raises `ValueError` for a run that cannot share pools."""
    from rollpacker.sim import plan_ideas

    config = model.with_overrides(args.overrides)
    if shared is None:
        return config
    if config.train.colocate:
        raise ValueError(
            f"--shared: {args.target} has engines and trainer on the same devices "
            "(train.colocate), and on shared pools each has its own: plan for a run without it"
        )
    return plan_ideas.changed(config, {"stream_trainer.enabled": False})


def _priced(base: Base, config: Scenario | RunConfig, shared: ClusterSpec | None) -> Base:
    """Returns `base` (where the search starts), with the prices of the device pools in the cluster
    `shared`. None: there are no such pools, and `base` stays as it is."""
    from rollpacker.cluster.decide.job import Phase
    from rollpacker.cluster.profile.job_profile import devices_of
    from rollpacker.config.schema import RunConfig
    from rollpacker.sim.plan_ideas import on_shared_pools
    from rollpacker.sim.plan_shared import pool_prices

    if shared is None:
        return base
    devices: dict[Phase, int]
    if isinstance(config, RunConfig):
        devices = devices_of(config)
    else:
        devices = {"rollout": config.cluster.gpus, "train": config.cluster.trainer_gpus}
    return on_shared_pools(base, pool_prices(shared.core_pools(), devices, base.prompts_per_step))


def _search(
    args: argparse.Namespace, base: Base, evaluate: Evaluate, budget: planning.Budget
) -> Plan:
    import os
    import sys
    import time

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from rollpacker.cli import plan_text
    from rollpacker.run.output import console
    from rollpacker.sim import plan as planning

    columns = (
        TextColumn("{task.description:>17}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}"),
    )
    errors = console(stderr=True)
    began_s = told_s = time.monotonic()
    small = planning.expected_steps(base, planning.BUDGETS["quick"])
    hint = small < planning.expected_steps(base, budget) * 2 / 3

    def progress(stage: str, done: int, total: int, share: float) -> None:
        nonlocal told_s, hint
        now_s = time.monotonic()
        left_s = (now_s - began_s) * (1 / share - 1) if share else 0.0
        left = plan_text.left(left_s)
        bars.update(bar, description=stage, completed=done, total=max(total, 1), left=left)
        if hint and now_s - began_s > LINE_EVERY_S and left_s > LONG_S:
            hint = False
            errors.print(
                f"rollpacker: this takes {left} more: every setting is simulated over many steps. "
                "--budget quick simulates less; Ctrl-C ends it, and tells the fastest so far.",
                soft_wrap=True,
                markup=False,
                highlight=False,
            )
        if not errors.is_terminal and now_s - told_s >= LINE_EVERY_S:
            told_s = now_s
            told = f"; {left} left" if left else ""
            print(f"rollpacker: {stage}: {done} of {total} simulations{told}", file=sys.stderr)

    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bars:
        bar = bars.add_task("starting", total=None, left="")
        return planning.plan(
            base,
            evaluate,
            budget=budget,
            max_shift=args.max_shift,
            jobs=(os.cpu_count() or 1) if args.jobs is None else args.jobs,
            progress=progress,
        )


def _comment(target: str, plan: Plan) -> str:
    """Text of the comment at the top of the config file that --write writes."""
    import textwrap

    lines = [f"The best setting that rollpacker plan found for {target}."]
    if plan.given_up is not None:
        lines += textwrap.wrap(plan.given_up, 98)
    return "\n".join(lines)


def _outside(
    args: argparse.Namespace,
    config: Scenario | RunConfig,
    model: RunModel | None,
    found: Plan,
    best: Any,
) -> str:
    """A sentence on which of the best settings lie beyond those that the constants were fitted to
    or measured with, so that predictions are uncertain. Empty if none do."""
    from rollpacker.sim.fitted_range import (
        OUTSIDE_STEPS,
        assumed,
        outside_of_run,
        outside_of_scenario,
    )
    from rollpacker.sim.given_constants import given_constants
    from rollpacker.sim.scenario import Scenario

    if model is None:
        assert isinstance(config, Scenario)
        given = given_constants(args.target, args.overrides).describe()
        now_s = found.current.step_s
        told = assumed({config.system: config}, {})
        outside = outside_of_scenario(config, step_s=now_s, whose="the current step", given=given)
        return " ".join(filter(None, (told, outside)))
    predicted = model.simulate_config(best, steps=OUTSIDE_STEPS, seed=1)
    return outside_of_run(model, best, predicted)


def _check_numbers(args: argparse.Namespace) -> None:
    """Raise `ValueError`, before any file is read, for options with impossible numbers."""
    check_jobs(args.jobs)
    if args.max_shift is not None and not 0 <= args.max_shift < 1:
        raise ValueError(f"--max-shift must be at least 0 and less than 1, not {args.max_shift}")


def _checked_out(name: str | None) -> Path | None:
    """Path of the file to write; None: no file. Raises `ValueError` if it cannot be written."""
    if name is None:
        return None
    out = Path(name)
    if out.suffix not in (".yaml", ".yml"):
        raise ValueError(f"--write {name}: a config's name ends in .yaml")
    if out.exists():
        raise ValueError(f"--write {name}: there is such a file already; choose another name")
    check_file("--write", name)
    return out


def _to_plain(target: str, plan: Plan, real: AsMeasured | None) -> dict[str, Any]:
    """Returns the plan as --json prints it. `real`: a run's measured and simulated step times;
    None: the plan is for a scenario."""
    plain = {"target": str(target), **plan.to_plain()}
    if real is not None:
        plain["measured"] = {"step_s": real.measured.mean["total_s"], "offset": real.offset}
    return plain
