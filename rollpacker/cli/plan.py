"""`rollpacker plan SCENARIO|RUN`: the best setting, what it gains, and why."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollpacker.cli.schedule import add_csv, write_schedule

if TYPE_CHECKING:
    from rich.table import Table

    from rollpacker.config.schema import RunConfig
    from rollpacker.sim import plan as planning
    from rollpacker.sim.plan_ideas import Base, Evaluate
    from rollpacker.sim.plan_result import Finding, Plan
    from rollpacker.sim.plan_run import AsMeasured
    from rollpacker.sim.result import SystemResult
    from rollpacker.sim.scenario import Scenario
    from rollpacker.sim.whatif import RunModel

MIN_FEWER, MIN_FASTER = 0.08, 0.02
"""Trained tokens fewer by more than this share are said; a rate within the other is the same."""
LINE_EVERY_S = 10.0
"""Without a terminal, a line of progress at most this often."""
NO_TAIL_SHARE = 0.3
"""With more responses than this at the cap, the cap is what ends a round."""
_EXAMPLES = """\
examples:
  rollpacker plan configs/scenarios/14b-16k.yaml
  rollpacker plan configs/scenarios/14b-16k.yaml --max-shift 0.2 --write faster.yaml
  rollpacker plan runs/quickstart --budget quick      for the machine that this run was made on
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
    parser.add_argument(
        "overrides",
        metavar="key=value",
        nargs="*",
        default=(),
        help="changes to the current settings",
    )
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
    parser.add_argument("--jobs", metavar="N", type=int, help="processes (default: one a core)")
    parser.add_argument("--write", metavar="FILE", help="write the best setting as a config")
    add_csv(parser)
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")


def run(args: argparse.Namespace) -> int:
    """Plan, and return the exit code. Raises `ValueError` for what the user got wrong."""
    from rollpacker.cli.driving import ending_as_interrupt

    with ending_as_interrupt():  # so that the processes end as well
        return _run(args) if args.csv is None else write_schedule(args)


def _run(args: argparse.Namespace) -> int:
    import dataclasses
    import json

    from rollpacker.cli import output
    from rollpacker.cli.errors import naming
    from rollpacker.config.load import save_config
    from rollpacker.config.schema import RunConfig
    from rollpacker.sim import plan as planning
    from rollpacker.sim import plan_ideas
    from rollpacker.sim.plan_run import RunEvaluate, as_measured, measured_base
    from rollpacker.sim.scenario import load_scenario
    from rollpacker.sim.whatif import load_run

    _check_numbers(args)
    budget = planning.BUDGETS[args.budget]
    out = _checked_out(args.write)
    config: Scenario | RunConfig
    evaluate: plan_ideas.Evaluate
    model: RunModel | None = None
    real: AsMeasured | None = None
    if Path(args.target).suffix in (".yaml", ".yml"):
        config = load_scenario(args.target, args.overrides)
        base, evaluate = plan_ideas.plan_base(config), plan_ideas.ScenarioEvaluate(scenario=config)
    else:
        model = load_run(args.target)
        config = model.with_overrides(args.overrides)
        real = as_measured(model)
        base = measured_base(config, model, real)
        evaluate = RunEvaluate(model=model, config=config)
        budget = evaluate.budget(budget)
    found = _search(args, base, evaluate, budget)
    best = plan_ideas.changed(config, found.best.candidate.changes)
    console = output.console()
    if args.json:
        print(json.dumps(_to_plain(args.target, found, real), allow_nan=False))
    else:
        corrected = config.tail_batching.debias != "none"
        console.print(_table(found, real))
        outside = _outside(args, config, model, found, best)
        trust = [] if real is None else _trust(found, real)
        for line in [*explain(found, corrected=corrected), *trust, outside]:
            console.print(line, soft_wrap=True, markup=False, highlight=False)
    if out is not None:  # last, so that a full disk does not cost the results
        if isinstance(best, RunConfig):  # a folder of the run's own name is there already
            best = dataclasses.replace(best, name=f"{best.name}-planned")
        with naming(out.parent):
            save_config(best, out, comment=_comment(args.target, found))
        if not args.json:
            console.print(f"\nWrote {out}.", soft_wrap=True, markup=False, highlight=False)
    return 0


def _search(
    args: argparse.Namespace, base: Base, evaluate: Evaluate, budget: planning.Budget
) -> Plan:
    """Plan, with a bar on stderr, or where that is no terminal with a line now and then."""
    import os
    import sys
    import time

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from rollpacker.cli.output import console
    from rollpacker.sim import plan as planning

    columns = (TextColumn("{task.description:>14}"), BarColumn(), MofNCompleteColumn())
    errors = console(stderr=True)
    told_s = time.monotonic()

    def progress(stage: str, done: int, total: int) -> None:
        nonlocal told_s
        bars.update(bar, description=stage, completed=done, total=max(total, 1))
        if not errors.is_terminal and time.monotonic() - told_s >= LINE_EVERY_S:
            told_s = time.monotonic()
            print(f"rollpacker: {stage}: {done} of {total} simulations", file=sys.stderr)

    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bars:
        bar = bars.add_task("starting", total=None)
        return planning.plan(
            base,
            evaluate,
            budget=budget,
            max_shift=args.max_shift,
            jobs=(os.cpu_count() or 1) if args.jobs is None else args.jobs,
            progress=progress,
        )


def _comment(target: str, plan: Plan) -> str:
    """For the head of the file."""
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
    """What of the best setting lies outside of what was fitted or measured."""
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
    """What can be refused before anything is read."""
    if args.jobs is not None and args.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, not {args.jobs}")
    if args.max_shift is not None and not 0 <= args.max_shift < 1:
        raise ValueError(f"--max-shift must be at least 0 and less than 1, not {args.max_shift}")


def _checked_out(name: str | None) -> Path | None:
    """Where to write. Raises `ValueError` before anything is simulated for it."""
    if name is None:
        return None
    out = Path(name)
    if out.suffix not in (".yaml", ".yml"):
        raise ValueError(f"--write {name}: a config's name ends in .yaml")
    if out.exists():
        raise ValueError(f"--write {name}: there is such a file already; choose another name")
    if not out.parent.is_dir():
        raise ValueError(f"--write {name}: there is no folder {out.parent}")
    return out


# -- what was found, for people ----------------------------------------------------


def _to_plain(target: str, plan: Plan, real: AsMeasured | None) -> dict[str, Any]:
    """As --json prints it; of a run with what it measured."""
    plain = {"target": str(target), **plan.to_plain()}
    if real is not None:
        plain["measured"] = {"step_s": real.measured.mean["total_s"], "offset": real.offset}
    return plain


def _trust(plan: Plan, real: AsMeasured) -> list[str]:
    """How far off the simulation is on the run as it was, which a gain should exceed."""
    off = real.offset
    direction = "longer" if off > 0 else "shorter"
    told = (
        f"Simulated as it was, the run's step is {abs(off):.1%} {direction} than measured "
        f"({_seconds(real.measured.mean['total_s'], plan)} s): trust no smaller difference than "
        "that"
    )
    gain = abs(plan.best.saved_s) / plan.current.step_s
    small = not plan.stays and gain <= abs(off)
    return [told + (f", and the {gain:.1%} above are smaller." if small else ".")]


def _table(plan: Plan, real: AsMeasured | None = None) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("setting", overflow="fold")
    for name in ("step s", "saved s", "tokens/s", "short/cascade/long s", "shift", "oracle"):
        table.add_column(name, justify="right", no_wrap=True)
    if real is not None:
        table.add_row("measured", *_measured_cells(real.measured, plan))
    rows = [("current", plan.current)]
    rows += [(_label(finding), finding) for finding in plan.ranked[:5]]
    rows += [(f"{_label(finding)} (too short)", finding) for finding in plan.too_short[:2]]
    if plan.oracle is not None:
        rows.append(("oracle", plan.oracle))
    for name, finding in rows:
        table.add_row(name, *_cells(finding, plan), style="bold" if finding is plan.best else None)
    return table


def _measured_cells(measured: SystemResult, plan: Plan) -> list[str]:
    rounds = ""
    kinds_s = {
        kind: [step.total_s for step in measured.steps if step.kind == kind]
        for kind in ("short", "cascade", "long")
    }
    if any(kinds_s.values()):
        rounds = "/".join(_seconds(sum(s) / len(s), plan) if s else "-" for s in kinds_s.values())
    step_s = _seconds(measured.mean["total_s"], plan)
    tokens = f"{measured.trained_tokens_per_s:,.0f}"
    return [step_s, "", tokens, rounds, f"{measured.length_shift:+.1%}", ""]


def _label(finding: Finding) -> str:
    """The factors; the switches of all finalists are the same."""
    names = [idea.name for idea in finding.candidate.ideas if idea.slot == "factors"]
    return names[0].removeprefix("factors ") if names else "current factors"


def _cells(finding: Finding, plan: Plan) -> list[str]:
    saved = ""
    if finding is not plan.current:
        saved = f"{_seconds(finding.saved_s, plan)} ± {_seconds(finding.saved_error_s, plan)}"
    rounds = ""
    if finding.kinds_s.keys() & {"short", "cascade", "long"}:
        kinds = (finding.kinds_s.get(kind) for kind in ("short", "cascade", "long"))
        rounds = "/".join("-" if s is None else _seconds(s, plan) for s in kinds)
    oracle = plan.oracle
    gap = "" if oracle is None else f"{finding.step_s / oracle.step_s - 1:+.0%}"
    tokens = f"{finding.tokens_per_s:,.0f}"
    return [_seconds(finding.step_s, plan), saved, tokens, rounds, f"{finding.shift:+.1%}", gap]


def _seconds(value: float, plan: Plan) -> str:
    """Seconds as text, with as many decimals as the length of a step asks for."""
    return f"{value:.{1 if plan.current.step_s >= 10 else 3}f}"


def explain(plan: Plan, *, corrected: bool) -> list[str]:
    """What to do and why, one line each. `corrected`: tail_batching.debias is on."""
    return [
        "",
        *_verdict(plan),
        *_reasons(plan),
        *_rejected(plan),
        "",
        *_small_print(plan, corrected),
    ]


def _verdict(plan: Plan) -> list[str]:
    return [*_what_to_do(plan), *_pays(plan)]


def _pays(plan: Plan) -> list[str]:
    """One sentence, where tail batching does not pay."""
    if plan.pays:
        return []
    gain, without = "", plan.untailed
    if plan.has_tail_batching and without is not None:
        best_s, without_s = _seconds(plan.best.step_s, plan), _seconds(without.step_s, plan)
        gain = f" (a step of {best_s} s with it, of {without_s} s without)"
    why, capped = "", plan.capped_share
    if capped is not None and capped > NO_TAIL_SHARE:
        why = f", as {capped:.0%} of the responses run to the cap and there is no tail to cut off"
    return ["", f"Tail batching does not pay here{gain}{why}: tail_batching.enabled=false will do."]


def _what_to_do(plan: Plan) -> list[str]:
    best, now = plan.best, plan.current
    if plan.stays:
        if not plan.current_keeps:
            return [
                f"Nothing that was tried keeps the bound of {plan.max_shift:.1%}, the current "
                "settings do not either: raise --max-shift, or correct the shift with "
                "tail_batching.debias=moments."
            ]
        if plan.refused is not None:
            return [_why_refused(plan, plan.refused)]
        return [
            "Stay with the current settings: nothing within the bound is faster by more than "
            "the noise."
        ]
    error = f" ± {best.saved_error_s / now.step_s:.1%}" if best.saved_error_s >= 0 else ""
    lines = [f"Best: {best.candidate.name}"]
    if best.saved_s < 0:
        lines.append(
            f"The step takes {-best.saved_s / now.step_s:.1%}{error} longer, which is the price of "
            f"the bound: the current settings shorten by {-now.shift:.1%}."
        )
    else:
        lines.append(
            f"The step takes {best.saved_s / now.step_s:.1%}{error} less: "
            f"{_seconds(best.step_s, plan)} s instead of {_seconds(now.step_s, plan)} s."
        )
        fewer = 1 - best.tokens / now.tokens if now.tokens else 0.0
        if fewer > MIN_FEWER:
            rate = best.tokens_per_s / now.tokens_per_s
            why = "is shorter only because it trains" if rate < 1 + MIN_FASTER else "trains"
            lines.append(
                f"It {why} on {fewer:.0%} fewer tokens: in trained tokens per second it is "
                f"{rate:.2f}x the current settings."
            )
    if plan.given_up is not None:
        lines.append(plan.given_up)
    lines += ["", "Changes:"]
    lines += [f"  {key}={_shown(value)}" for key, value in sorted(best.candidate.changes.items())]
    return lines


def _why_refused(plan: Plan, refused: Finding) -> str:
    assert plan.trust is not None
    now = plan.current
    gain = refused.tokens_per_s / now.tokens_per_s - 1
    return (
        f"Stay with the current settings: with {refused.candidate.name} the step takes "
        f"{refused.saved_s / now.step_s:.1%} less, but trained tokens per second change by "
        f"{gain:+.1%}, which is not more than the {plan.trust:.1%} by which the simulation is off."
    )


def _shown(value: object) -> str:
    import json

    return value if isinstance(value, str) else json.dumps(value)


def _reasons(plan: Plan) -> list[str]:
    if not plan.reasons:
        return []
    lines = ["", "Why, one after the other (and what is lost if only this one is left out):"]
    for reason in plan.reasons:
        added, lost = _seconds(reason.added_s, plan), _seconds(reason.left_out_s, plan)
        lines.append(
            f"  saves {added:>6} s  ({lost} ± {_seconds(reason.left_out_error_s, plan)} s)  "
            f"{reason.idea.name}"
        )
    return lines


def _rejected(plan: Plan) -> list[str]:
    if not plan.rejected:
        return []
    lines = ["", "Tried and not needed, with what each saves alone:"]
    return lines + [f"  {saved:+7.1%}    {idea.name}" for idea, saved in plan.rejected]


def _small_print(plan: Plan, corrected: bool) -> list[str]:
    if corrected:
        bound = (
            "tail_batching.debias is on: its weights undo the shift, so the bound, which is on the "
            "shift after the correction, holds for every factor. The table has the shift before."
        )
    else:
        bound = (
            f"Bound: trained responses on average at most {plan.max_shift or 0:.1%} shorter "
            f"{'or longer ' if plan.order_only else ''}than the policy's own"
            + (
                f", at {plan.mismatch:.1e} mismatches per carried token and update."
                if plan.order_only
                else "."
            )
        )
    if plan.measured_shift is not None and not corrected:
        bound += (
            f" The current settings are held to it by the shift that the run measured "
            f"({plan.measured_shift:+.1%}), not by the simulated one ({plan.current.shift:+.1%})."
        )
    return [
        bound,
        f"Simulated: {plan.num_simulated} steps; these results: {plan.num_seeds} seeds of "
        f"{plan.num_steps} steps or more, kinds of round weighted as in the long run; ± is the "
        "standard error over the seeds.",
    ]
