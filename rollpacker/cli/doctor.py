"""`rollpacker doctor [CONFIG]`: what this machine can do, a line for each finding, and a cure if
something is wrong. With a config it tries what `train --dry-run` and a run's start try, each part
by itself."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rollpacker.cli import findings, trials
from rollpacker.cli.arguments import add_overrides
from rollpacker.cli.findings import Finding
from rollpacker.imports import MissingPackageError
from rollpacker.run import output
from rollpacker.run.error_messages import classify

if TYPE_CHECKING:
    from rollpacker.config.schema import RunConfig

PATIENCE_S = 30.0
"""Seconds after which a check that gives no answer is given up."""
INPUTS_PATIENCE_S = 600.0
"""Seconds after which longer checks (of data, rewards and the hosts of a cluster) are given up."""
NAME_WIDTH = 12
MARKS = {"ok": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("fail", "bold red")}
_BLAMED = {"DataError": "data", "EnvironmentSetupError": "environment"}
"""Errors of a check that looks at several things, mapped to the name of the thing at fault."""

_HELP = """\
Look at what this machine can do: software, processors, memory, GPUs, sandbox, engine; with a
config also whether its model, data, rewards and sandbox can be had: every row is read, and every
reward function is called once, as at a run's start. Changes nothing.

exit codes:
  0    training can start (there may be warnings)
  1    something keeps it from starting: the lines marked "fail"
  2    the command is not right
"""


class _Check(NamedTuple):
    name: str
    look: Callable[[], Finding | list[Finding]]
    must: bool = True
    """Whether an error in the check means that training cannot start. False: it is a warning."""
    patience_s: float | None = None
    """Maximum seconds that the check may take. None: `PATIENCE_S`."""


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor",
        help="what this machine can do, and what to do about the rest",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", nargs="?", help="YAML file of a run")
    add_overrides(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object only")


def run(args: argparse.Namespace) -> int:
    """Make all checks, print the findings, and return 0 if training can start, else 1."""
    began = time.perf_counter()
    console = output.console(highlight=False)
    found: list[Finding] = []
    logging.disable(logging.WARNING)  # what matters of it is in the findings
    try:
        for check in _checks(args.config, args.overrides):
            for finding in _outcome(check):
                found.append(finding)
                if not args.json:
                    _print(console, finding)
    finally:
        logging.disable(logging.NOTSET)
    seconds = time.perf_counter() - began
    can_start = all(finding.level != "fail" for finding in found)
    if args.json:
        lines = [dataclasses.asdict(finding) for finding in found]
        document = {"can_start": can_start, "seconds": round(seconds, 2), "findings": lines}
        print(json.dumps(document, indent=1))
    else:
        print(_verdict(found, seconds))
    return 0 if can_start else 1


def _verdict(found: Sequence[Finding], seconds: float) -> str:
    fails = sum(finding.level == "fail" for finding in found)
    warnings = sum(finding.level == "warn" for finding in found)
    said = "Training can start" if not fails else "Training cannot start"
    counts = [f"{fails} failed"] * bool(fails) + [f"{warnings} to look at"] * bool(warnings)
    return f"{said}{': ' if counts else ''}{', '.join(counts)}. ({seconds:.1f} s)"


def _checks(path: str | None, overrides: Sequence[str]) -> list[_Check]:
    """The checks in order: those of the machine, then those of the config, if it can be read."""
    from rollpacker.sandbox.sandbox import SandboxConfig

    config, problem = _load(path, overrides)
    read = [] if path is None else [problem or Finding("ok", "config", path)]
    sandbox = SandboxConfig() if config is None else config.sandbox
    needed = config is not None and any(r.function in ("code", "math") for r in config.rewards)
    runs_dir = Path("runs" if config is None else config.runs_dir)
    checks = [
        _Check("python", findings.python),
        _Check("packages", findings.packages),
        _Check("config", lambda: read),
        _Check("processors", findings.cpus),
        _Check("memory", findings.memory),
        _Check("disk", lambda: findings.disk(runs_dir)),
        _Check("/dev/shm", findings.shared_memory),
        _Check("limits", findings.open_limits),
        _Check("torch", findings.torch_build),
        _Check("gpu", findings.gpus),
        _Check("engine", trials.engine),
        _Check("sandbox", lambda: trials.sandbox(sandbox, needed=needed), must=needed),
    ]
    if config is None:
        return checks
    checks += [
        _Check("model", lambda: trials.model(config)),
        _Check("run", lambda: trials.run_folder(config)),
        _Check("training", lambda: trials.training(config)),
        _Check("rewards", lambda: trials.inputs(config), patience_s=INPUTS_PATIENCE_S),
    ]
    if config.runtime == "ray":
        look = partial(trials.cluster, config)
        checks.append(_Check("cluster", look, patience_s=INPUTS_PATIENCE_S))
    for tracker in config.tracker_configs:
        checks.append(_Check(tracker.name, partial(trials.tracker, tracker), must=False))
    return checks


def _load(path: str | None, overrides: Sequence[str]) -> tuple[RunConfig | None, Finding | None]:
    if path is None:
        return None, None
    from rollpacker.config.load import ConfigError, load_config
    from rollpacker.config.schema import RunConfig

    try:
        return load_config(path, overrides, RunConfig), None
    except (ConfigError, OSError) as error:
        return None, Finding("fail", "config", str(error), "Correct the config.")


class _TooSlow(Exception):
    """Raised if a check takes too long, so that nothing is known of what it checks."""


def _looked(check: _Check) -> list[Finding]:
    """Make a check in a thread, and return its findings. Raises what the check raises, and
    `_TooSlow` if the check takes too long."""
    outcome: list[Finding | list[Finding] | Exception] = []

    def look() -> None:
        try:
            outcome.append(check.look())
        except Exception as error:  # handed on to who waits
            outcome.append(error)

    patience_s = PATIENCE_S if check.patience_s is None else check.patience_s
    thread = threading.Thread(target=look, daemon=True)  # one that hangs is left behind
    thread.start()
    thread.join(patience_s)
    if not outcome:
        raise _TooSlow(f"no answer within {patience_s:g} s")
    (found,) = outcome
    if isinstance(found, Exception):
        raise found
    return found if isinstance(found, list) else [found]


def _outcome(check: _Check) -> list[Finding]:
    """Make a check, and return its findings. If it raises an error, that is a finding."""
    try:
        return _looked(check)
    except _TooSlow as error:
        cure = "The machine may be busy: run it again when it is not."
        return [Finding("warn", check.name, f"slow: not measured ({error})", cure)]
    except ModuleNotFoundError as error:
        cure = "Run make again, or: pip install --editable ."
        return [Finding("fail", check.name, f"the package {error.name} is missing", cure)]
    except MissingPackageError as error:
        text, _, cure = str(error).partition(": ")
        return [Finding("fail", check.name, text, cure)]
    except Exception as error:  # whatever it is, the other checks go on
        code, text = classify(error)
        cure = "Correct that, and run doctor again."
        if code == 1:  # not the user's to mend
            text = f"{type(error).__name__}: {error}"
            cure = "Please report this line, and how you got it."
        name = _BLAMED.get(type(error).__name__, check.name)
        return [Finding("fail" if check.must else "warn", name, text, cure)]


def _print(console: Any, finding: Finding) -> None:
    """Print a finding and its cure. On a terminal long lines are folded; elsewhere a finding is one
    line, and its cure another."""
    from rich.table import Table
    from rich.text import Text

    mark, style = MARKS[finding.level]
    text, cure = finding.text, finding.cure
    if not console.is_terminal:
        text = text.replace("\n", "\n" + " " * (NAME_WIDTH + 6))
        print(f"{mark}  {finding.name:<{NAME_WIDTH}}{text}")
        if cure:
            print(f"{'':<{NAME_WIDTH + 6}}-> {cure}")
        return
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=4)
    grid.add_column(width=NAME_WIDTH - 2, style="bold")
    grid.add_column(overflow="fold")
    grid.add_row(Text(mark, style=style), finding.name, Text(text))
    if cure:
        grid.add_row("", "", Text(f"-> {cure}", style="cyan"))
    console.print(grid)
