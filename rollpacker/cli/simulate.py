"""`rollpacker simulate SCENARIO [key=value ...]`: what settings would cost, in virtual time."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollpacker.cli.arguments import add_overrides, check_file, check_jobs, compared
from rollpacker.cli.simulations import simulate_all

if TYPE_CHECKING:
    from rollpacker.sim.result import SystemResult
    from rollpacker.sim.scenario import Scenario

SIMULATED = "simulated"
"""Name, in the results of --from, of the recorded run simulated with its own settings."""


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "simulate",
        help="what a setting would cost on a cluster, without the cluster",
        description="Runs a scenario in virtual time through the same decisions as a real run, "
        "prints where the step time goes, and draws a timeline.",
        epilog="With --compare, settings of a system (tail_batching, reward_scheduler, "
        "parallelism_planner, stream_trainer, oracle) hold for the scenario's own system; the "
        "others are as --presets lists them. docs/simulation.md says what is modelled, and how "
        "well.",
    )
    parser.add_argument("scenario", nargs="?", metavar="SCENARIO", help="YAML file")
    add_overrides(parser)
    parser.add_argument(
        "--from",
        dest="from_run",
        metavar="RUN",
        help="instead of a scenario: the prompts, lengths and speed of a real run, from its event "
        "log; key=value says what would have been different",
    )
    parser.add_argument(
        "--compare",
        metavar="NAME,...",
        help="these systems on the same workload (see --presets), or with train.pipeline these "
        "orders of its stages: 1f1b, zero-bubble, host, adapted, ready",
    )
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    picture = parser.add_mutually_exclusive_group()
    picture.add_argument(
        "--picture",
        metavar="FILE",
        help="draw the timeline here: .png, .svg or .pdf (default: SCENARIO-timeline.png in the "
        "working directory; with --json none)",
    )
    picture.add_argument("--no-picture", action="store_true", help="draw no timeline")
    parser.add_argument(
        "--log", metavar="FILE", help="write the simulated run's event log, as of a real run"
    )
    parser.add_argument(
        "--jobs",
        metavar="N",
        type=int,
        help="systems simulated at the same time (default: as many as there are cores)",
    )
    parser.add_argument(
        "--presets", action="store_true", help="list models, GPUs, systems, lengths and rewards"
    )


def run(args: argparse.Namespace) -> int:
    """Simulate and print, and return the exit code. Raises `ValueError` for a user's mistake."""
    if args.presets:
        if args.json:
            raise ValueError("--presets and --json exclude each other: the list is for people")
        from rollpacker.sim.presets import describe_presets

        print(describe_presets())
        return 0
    if args.scenario is not None and "=" in args.scenario and args.from_run is not None:
        args.scenario, args.overrides = None, [args.scenario, *args.overrides]
    _check(args)
    picture = _picture(args)
    if args.from_run is not None:
        return _run_what_if(args, picture)
    scenarios = _scenarios(args)
    own = scenarios.pop("")
    results = simulate_all(scenarios, jobs=args.jobs, log=args.log)
    _warn_of_few_micro_batches(results)
    if args.json:
        _print_json(own, results)
    else:
        from rollpacker.pipeline.sim.show import explain_pipelines
        from rollpacker.sim.table import explain, render

        steps = f"{own.steps} step{'s' if own.steps > 1 else ''}"
        print(f"{own.name}: {_machine_text(own)}, {steps}\n")
        print(render(results))
        _print_meaning(explain(results))
        if text := explain_pipelines(results):
            _print_meaning(text)
        if text := _assumed(own, results):
            _print_meaning(text)
        _print_meaning(_outside(args, own, results))
    _draw(results, picture, own.name, told=not args.json)
    return 0


# -- the command line --------------------------------------------------------------


def _check(args: argparse.Namespace) -> None:
    """Raise `ValueError`, before any file is read, for options that make no sense together."""
    if args.scenario is not None and "=" in args.scenario and not Path(args.scenario).exists():
        raise ValueError(f"{args.scenario} is a setting: the scenario file comes before it")
    if args.scenario is None and args.from_run is None:
        raise ValueError(
            "simulate needs a scenario, such as configs/scenarios/14b-16k.yaml, or --from RUN"
        )
    if args.scenario is not None and args.from_run is not None:
        raise ValueError(
            f"{args.scenario} and --from {args.from_run} exclude each other: a scenario is made "
            "up, --from takes everything from a real run"
        )
    if args.from_run is not None:
        for option, given in (("--compare", args.compare), ("--log", args.log)):
            if given is not None:
                raise ValueError(f"{option} and --from exclude each other: it needs a scenario")
    check_jobs(args.jobs)
    for option, file in (("--picture", args.picture), ("--log", args.log)):
        if file is not None:
            check_file(option, file)
    if args.log is not None and os.path.lexists(args.log):  # it may be a real run's
        raise ValueError(f"--log {args.log}: there is such a file already; choose another name")
    if args.log is not None and args.log == args.picture:
        raise ValueError(f"--log and --picture are both {args.log}: choose two names")


def _picture(args: argparse.Namespace) -> Path | None:
    """Path of the timeline's picture to draw. None if none is to be drawn."""
    from rollpacker.imports import MissingPackageError, missing
    from rollpacker.sim.timeline import FORMATS

    lacking = missing("matplotlib", extra="report", what="drawing the timeline")
    if args.picture is not None:
        picture = Path(args.picture)
        if picture.suffix not in FORMATS:
            raise ValueError(f"--picture {picture}: the name must end in {', '.join(FORMATS)}")
        if lacking is not None:
            raise MissingPackageError(lacking)
        return picture
    if args.json or args.no_picture:
        return None
    if lacking is not None:
        _note(lacking)
        return None
    if args.from_run is not None:
        return Path(f"{_run_name(args.from_run)}-what-if.png")
    return Path(f"{Path(args.scenario).stem}-timeline.png")


def _scenarios(args: argparse.Namespace) -> dict[str, Scenario]:
    """The scenarios to simulate, by the name of the system (way to run the steps, such as tail
    batching) or of the order of pipeline stages. Under "" the scenario as it is in the file."""
    from rollpacker.pipeline.sim.spec import PIPELINES
    from rollpacker.sim.scenario import load_scenario

    path = Path(args.scenario)
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a scenario file, or a run with --from {path}")
    own = load_scenario(path, args.overrides)
    if args.compare is None:
        _warn_of_part_window(own.system, own)
        return {"": own, own.system: own}
    names = _names(args.compare, own)
    if args.log is not None and len(names) > 1:
        raise ValueError(f"--log writes the log of one system, and --compare has {len(names)}")
    if own.system not in names and not PIPELINES.keys() & set(names):
        _warn_of_unused(args.overrides, own.system)
    compared = {
        name: _named(own, name) if name in PIPELINES else load_scenario(path, args.overrides, name)
        for name in names
    }
    for name, scenario in compared.items():
        _warn_of_part_window(name, scenario)
    return {"": own} | compared


def _names(text: str, own: Scenario) -> list[str]:
    """Names in the option --compare, each once: of systems (ways to run the steps, such as tail
    batching), or of orders of pipeline stages. Raises `ValueError` for an unknown name."""
    from rollpacker.pipeline.sim.spec import PIPELINES
    from rollpacker.sim.presets import SYSTEMS

    asked = [name.strip() for name in text.split(",")]
    orders = [name for name in asked if name in PIPELINES]
    if orders and own.train.pipeline is None:
        raise ValueError(
            f"--compare: {orders[0]} is an order of a trainer's stages, and the scenario has none: "
            "set train.pipeline.stages"
        )
    known = [*SYSTEMS, *([] if own.train.pipeline is None else PIPELINES)]
    return compared(text, known, "system")


def _named(own: Scenario, name: str) -> Scenario:
    """The scenario `own`, with the order of pipeline stages or the system (way to run the steps) of
    this name in place of its own."""
    from rollpacker.pipeline.sim.spec import PIPELINES
    from rollpacker.sim.scenario import with_pipeline, with_system

    return with_pipeline(own, name) if name in PIPELINES else with_system(own, name)


def _warn_of_unused(overrides: Sequence[str], system: str) -> None:
    from rollpacker.sim.presets import SWITCHES

    unused = [text for text in overrides if text.split("=")[0].split(".")[0] in SWITCHES]
    if unused:
        _note(
            f"{', '.join(unused)} has no effect: it is a setting of {system}, which --compare "
            "leaves out"
        )


def _warn_of_part_window(name: str, scenario: Scenario) -> None:
    window, steps = scenario.oracle.reorder_window, scenario.steps
    if window and steps % window:
        _note(
            f"{name} sorts the prompts of {window} steps by length, the short ones first, so "
            f"{steps} steps are not a fair sample of it: take a multiple of {window}"
        )


def _warn_of_few_micro_batches(results: Mapping[str, SystemResult]) -> None:
    for name, result in results.items():
        found = result.pipeline
        if found is not None and found.num_micro_batches < found.stages:
            _note(
                f"{name} has sweeps of {found.num_micro_batches} micro-batches through "
                f"{found.stages} stages, which are idle {found.bubble_share:.0%} of the time: "
                "lower train.pipeline.micro_batch_tokens or stages"
            )


def _note(text: str) -> None:
    print(f"rollpacker: note: {text}", file=sys.stderr)


def _assumed(own: Scenario, results: Mapping[str, SystemResult]) -> str:
    from rollpacker.sim.fitted_range import assumed

    return assumed({name: _named(own, name) for name in results}, results)


def _outside(args: argparse.Namespace, own: Scenario, results: Mapping[str, SystemResult]) -> str:
    """A sentence on what in a simulated step lies beyond what the constants were fitted to, so that
    its seconds are uncertain. The step is that of the system of `own`, or of the first."""
    from rollpacker.sim.fitted_range import outside_of_scenario
    from rollpacker.sim.given_constants import given_constants

    name = own.system if own.system in results else next(iter(results))
    return outside_of_scenario(
        _named(own, name),
        step_s=results[name].mean["total_s"],
        whose=f"{name}'s step",
        given=given_constants(args.scenario, args.overrides).describe(),
    )


# -- what if -----------------------------------------------------------------------


def _run_what_if(args: argparse.Namespace, picture: Path | None) -> int:
    from rollpacker.report.log import events_path
    from rollpacker.sim.fitted_range import outside_of_run
    from rollpacker.sim.table import explain_what_if, render
    from rollpacker.sim.whatif import what_if

    events_path(args.from_run)  # raises if there is none
    found = what_if(args.from_run, args.overrides)
    results = {
        "measured": found.measured,
        SIMULATED: found.predicted_same,
        "what-if": found.predicted,
    }
    if args.json:
        _print_json(found.scenario, results)
    else:
        if not args.overrides:  # the same once more
            del results["what-if"]
        print(f"{found.fit_text}\n")
        # Idle time is left out: of a real run empty slots are known, here empty engines.
        print(render(results, reference=SIMULATED, idle=False, last_stage="sync, commit"))
        _print_meaning(explain_what_if(results))
        _print_meaning(outside_of_run(found.model, found.config, found.predicted))
    _draw(results, picture, _run_name(args.from_run), reference=SIMULATED, told=not args.json)
    return 0


def _run_name(run: str) -> str:
    """The name of a run's folder, or of an event log's file without its ending."""
    path = Path(run).resolve()
    return path.stem if path.is_file() else path.name


# -- output ------------------------------------------------------------------------


def _machine_text(scenario: Scenario) -> str:
    model = scenario.model if isinstance(scenario.model, str) else "a model of its own shape"
    cluster = scenario.cluster
    text = f"{model} on {cluster.gpus} x {cluster.gpu if isinstance(cluster.gpu, str) else 'GPU'}"
    if not cluster.is_apart:
        return text
    trainer = cluster.train_gpu or cluster.gpu
    name = trainer if isinstance(trainer, str) else "GPU"
    return f"{text}, trained on {cluster.trainer_gpus} x {name}"


def _print_meaning(text: str) -> None:
    import textwrap

    from rollpacker.report.table import MAX_WIDTH

    print(f"\n{textwrap.fill(text, MAX_WIDTH)}")


def _draw(
    results: Mapping[str, SystemResult],
    picture: Path | None,
    title: str,
    *,
    told: bool,
    reference: str | None = None,
) -> None:
    if picture is None:
        return
    from rollpacker.sim.timeline import draw

    draw(results, picture, title=title, reference=reference)
    if told:
        print(f"\nThe timeline is in {picture}.")


def _print_json(scenario: object, results: Mapping[str, SystemResult]) -> None:
    import json

    from rollpacker.config.check import to_plain_value

    plain = {
        "scenario": to_plain_value(scenario),
        "systems": {
            name: {
                **result.to_plain(),
                "paired_shift": result.paired_shift,
                "mismatch": result.mismatch,
            }
            for name, result in results.items()
        },
    }
    print(json.dumps(_finite(plain), indent=1, allow_nan=False))


def _finite(value: Any) -> Any:
    """The value with None in place of NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return None
    return value
