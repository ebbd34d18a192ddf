"""`rollpacker doctor [CONFIG]`: what this machine can do, a line for each finding, and a cure if
something is wrong. With a config it tries what `train --dry-run` and a run's start try, each part
by itself. With `--gpu` it starts an engine and a trainer (`bring_up.py`)."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import platform
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rollpacker.cli import findings, trials
from rollpacker.cli.arguments import add_overrides
from rollpacker.cli.findings import Finding, Untried
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
_FOLDER = re.compile(r"(?<![\w.])~?/(?!dev/|proc/)(?:[^\s/:'\"]+/)*")
"""Matches the folders of a path, which an issue does not need and which may name a user."""

_HELP = """\
Look at what this machine can do: software, processors, memory, GPUs, sandbox, engine; with a
config also whether its model, data, rewards and sandbox can be had: every row is read, and every
reward function is called once, as at a run's start. Changes nothing.

With --gpu instead a bring-up of some minutes: an engine and a trainer are started as a run starts
them, with the config's model or a small random one; the last lines are a block of text for an
issue, without names of this machine.

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
    cure: str = ""
    """What to do if the check fails and its error does not say it. Empty: to report the error."""
    cut: Callable[[], None] | None = None
    """Function that ends what a check is waiting for if that takes too long, which is then a
    failure. None: the check is left behind, and a warning says that it was slow."""


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
    parser.add_argument("--gpu", action="store_true", help="start an engine and a trainer, and try")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="with --gpu: where to compute"
    )


def run(args: argparse.Namespace) -> int:
    """Make all checks, print the findings, and return 0 if training can start, else 1."""
    began = time.perf_counter()
    console = output.console(highlight=False)
    found: list[Finding] = []
    logging.disable(logging.WARNING)  # what matters of it is in the findings
    try:
        with _tried(args) as checks:
            for check in checks:
                with _shown(console, check, args):
                    outcome = _outcome(check)
                for finding in outcome:
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
    elif args.gpu:
        print(f"\nFor an issue:\n\n{_block(found, args.device, seconds)}")
    else:
        print(_verdict(found, seconds))
    return 0 if can_start else 1


@contextmanager
def _tried(args: argparse.Namespace) -> Iterator[Iterable[_Check]]:
    """A context with the checks that are asked for, which at its end ends their processes. Raises
    `ValueError` for --gpu without a GPU."""
    if not args.gpu:
        yield _checks(args.config, args.overrides)
        return
    from rollpacker.cli import bring_up

    path, overrides = args.config, list(args.overrides)
    if path is not None and "=" in path and not Path(path).exists():
        path, overrides = None, [path, *overrides]
    if args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ValueError(
                "--gpu: torch sees no GPU here (rollpacker doctor says why); --device cpu tries the"
                " same parts on the processors"
            )
    tried = bring_up.BringUp(args.device, path, overrides)
    try:
        yield (
            _Check(
                part.name,
                part.look,
                patience_s=part.patience_s or bring_up.PATIENCE_S,
                cure=part.cure,
                cut=tried.cut,
            )
            for part in tried.parts()
        )
    finally:
        tried.close()


def _shown(console: Any, check: _Check, args: argparse.Namespace) -> AbstractContextManager[Any]:
    """A context in which a terminal shows the running part of a bring-up."""
    if not args.gpu or args.json or not console.is_terminal:
        return nullcontext()
    within = f"{check.name} ... (given up after {check.patience_s:.0f} s)"
    shown: AbstractContextManager[Any] = console.status(within)
    return shown


def _block(found: Sequence[Finding], device: str, seconds: float) -> str:
    """Returns the findings as one block of text, without folders and the name of this machine."""
    lines = [f"rollpacker doctor --gpu --device {device}: {seconds:.0f} s"]
    lines += [f"{MARKS[one.level][0]}  {one.name:<{NAME_WIDTH}}{one.text}" for one in found]
    text = _FOLDER.sub("", "\n".join(lines))
    name = platform.node()
    return f"```text\n{text.replace(name, 'host') if name else text}\n```"


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
    except Untried as error:
        text, cure = f"not tried: it needs the part {error}", "Mend that part first."
        return [Finding("warn", check.name, text, cure)]
    except _TooSlow as error:
        if check.cut is not None:
            check.cut()
            cure = check.cure or "Run it again."
            return [Finding("fail", check.name, f"{error}: its processes were ended", cure)]
        cure = "The machine may be busy: run it again when it is not."
        return [Finding("warn", check.name, f"slow: not measured ({error})", cure)]
    except ModuleNotFoundError as error:
        cure = "Run make again, or: pip install 'rollpacker[train]'"
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
        if check.cure and not isinstance(error, ValueError):  # which says it itself
            cure = check.cure
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
