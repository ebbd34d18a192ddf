"""`rollpacker doctor [CONFIG]`: what this machine can do, a line a finding, each with its cure."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollpacker.cli import findings, output, trials
from rollpacker.cli.cluster_findings import cluster
from rollpacker.cli.errors import classify
from rollpacker.cli.findings import Finding
from rollpacker.imports import MissingPackageError

if TYPE_CHECKING:
    from rollpacker.config.schema import RunConfig

PATIENCE_S = 30.0
"""A check that takes longer is given up."""
INPUTS_PATIENCE_S = 600.0
"""For data and rewards, which may have much to look at."""
CLUSTER_PATIENCE_S = 180.0
"""For the hosts of a cluster, each of which starts a process to answer."""
NAME_WIDTH = 12
MARKS = {"ok": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("fail", "bold red")}

_HELP = """\
Look at what this machine can do: software, processors, memory, GPUs, sandbox, engine; with a
config also whether its model, data, rewards and sandbox can be had: every row is read, and every
reward function is called once, as at a run's start. Changes nothing.

exit codes:
  0    training can start (there may be warnings)
  1    something keeps it from starting: the lines marked "fail"
  2    the command is not right
"""

Check = Callable[[], "Finding | list[Finding]"]


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor",
        help="what this machine can do, and what to do about the rest",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", nargs="?", help="YAML file of a run")
    parser.add_argument(
        "overrides", nargs="*", default=(), metavar="key=value", help="replace single settings"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object only")


def run(args: argparse.Namespace) -> int:
    """Look at everything, and return the exit code: 0 if training can start, else 1."""
    began = time.perf_counter()
    logging.disable(logging.WARNING)  # what matters of it is in the findings
    try:
        found = _print_all(_examine(args.config, args.overrides), as_text=not args.json)
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


# --- what is looked at ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _NamedCheck:
    name: str
    check: Check
    must: bool = True
    """Training cannot start if the check itself breaks."""
    patience_s: float | None = None
    """None: `PATIENCE_S`."""
    needs: str | None = None
    """A check without whose success this one says nothing."""


def _examine(path: str | None, overrides: Sequence[str]) -> Iterator[_NamedCheck]:
    """The checks in order. The sandbox's runs beside those that load torch."""
    from rollpacker.sandbox.sandbox import SandboxConfig

    yield _NamedCheck("system", findings.system)
    yield _NamedCheck("python", findings.python)
    yield _NamedCheck("packages", findings.packages)
    config, problem = _load(path, overrides)
    if path is not None:
        yield _NamedCheck("config", lambda: problem or Finding("ok", "config", path))
    yield _NamedCheck("safety", findings.unsafe_versions)
    yield _NamedCheck("processors", findings.cpus)
    yield _NamedCheck("memory", findings.memory)
    sandbox = config.sandbox if config is not None else SandboxConfig()
    needed = config is not None and any(r.function in ("code", "math") for r in config.rewards)
    later = _Later(lambda: trials.sandbox(sandbox, needed=needed))
    runs_dir = Path(config.runs_dir if config is not None else "runs")
    yield _NamedCheck("disk", lambda: findings.disk(runs_dir))
    yield _NamedCheck("/dev/shm", findings.shared_memory)
    yield _NamedCheck("limits", findings.open_limits)
    yield _NamedCheck("torch", findings.torch_build)
    yield _NamedCheck("gpu", findings.gpus)
    yield _NamedCheck("bf16", findings.bf16)
    yield _NamedCheck("engine", trials.engine)
    yield _NamedCheck("sandbox", later.result, must=needed)
    if config is not None:
        yield _NamedCheck("model", lambda: trials.model(config))
        yield _NamedCheck("run", lambda: trials.run_folder(config))
        yield _NamedCheck("training", lambda: trials.training(config))
        yield _NamedCheck("data", lambda: trials.inputs(config), patience_s=INPUTS_PATIENCE_S)
        if config.runtime == "ray":
            yield _NamedCheck("cluster", lambda: cluster(config), patience_s=CLUSTER_PATIENCE_S)
        yield _NamedCheck("memory fit", lambda: trials.fit(config), needs="model")
        for tracker in config.tracker_configs:
            yield _NamedCheck(tracker.name, partial(findings.tracker, tracker), must=False)


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
    """A check gave no answer in its time, which says nothing about what it looks at."""


class _Later:
    """A check that runs in a thread of its own."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self._found: Finding | list[Finding] | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found = self._check()
        except Exception as error:  # handed on to who asks for the result
            self._error = error

    def result(self, patience_s: float | None = None) -> Finding | list[Finding]:
        """Raises what the check raised, and `_TooSlow` after `patience_s` (None: `PATIENCE_S`)."""
        patience_s = PATIENCE_S if patience_s is None else patience_s
        self._thread.join(patience_s)
        if self._error is not None:
            raise self._error
        if self._found is None:
            raise _TooSlow(f"no answer within {patience_s:g} s")
        return self._found


def _outcome(one: _NamedCheck) -> list[Finding]:
    """What a check found; one that breaks is itself a finding."""
    try:
        found = _Later(one.check).result(one.patience_s)
    except ModuleNotFoundError as error:
        cure = "Run make again, or: pip install --editable ."
        return [Finding("fail", one.name, f"the package {error.name} is missing", cure)]
    except MissingPackageError as error:
        text, _, cure = str(error).partition(": ")
        return [Finding("fail", one.name, text, cure)]
    except _TooSlow as error:
        cure = "The machine may be busy: run it again when it is not."
        return [Finding("warn", one.name, f"slow: not measured ({error})", cure)]
    except Exception as error:  # whatever it is, the other checks go on
        code, told = classify(error)
        if code != 1:  # the user's to mend, and the message says how
            cure = "Correct that, and run doctor again."
            return [Finding("fail" if one.must else "warn", one.name, told, cure)]
        text = f"{type(error).__name__}: {error}"
        cure = "Please report this line, and how you got it."
        return [Finding("fail" if one.must else "warn", one.name, text, cure)]
    return found if isinstance(found, list) else [found]


# --- output ---------------------------------------------------------------------------------------


def _print_all(checks: Iterator[_NamedCheck], *, as_text: bool) -> list[Finding]:
    """Look, and say it at once, line by line."""
    console = output.console(highlight=False)
    found: list[Finding] = []
    show = as_text and console.is_terminal
    with console.status("looking around ...") if show else contextlib.nullcontext() as status:
        for one in checks:
            if status is not None:
                status.update(f"looking at {one.name} ...")
            if any(f.name == one.needs and f.level == "fail" for f in found):
                continue
            for finding in _outcome(one):
                found.append(finding)
                if as_text:
                    _print(console, finding)
    return found


def _print(console: Any, finding: Finding) -> None:
    """One line on a terminal if it fits; elsewhere always one line, and one for the cure."""
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
