"""One way to run a benchmark: `python benchmarks/NAME.py [--option VALUE ...]`.

A benchmark is a file with its claim in its head and a function `main`, whose parameters are its
options and whose file ends with `bench(main)`. It measures its arms by turns (`turns`) and returns
what it has found, which is written to `benchmarks/results/NAME.json` with the machine, the
versions, the commit, the command and the date (`machine.py`). Where a claim can be missed, `bench`
is told how to see that, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import statistics
import subprocess
import sys
import time
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml
from machine import RESULTS, ROOT, write_result

sys.path.insert(0, str(ROOT))  # worlds of tests are arms of some benchmarks

__all__ = ["RESULTS", "ROOT", "write_result"]
PUBLISHED: dict[str, Any] = yaml.safe_load((ROOT / "benchmarks/published.yaml").read_text())
"""What others have published, by source."""
Arm = TypeVar("Arm")
LONGEST = 400
"""Characters of one key's value that are printed; the file has all of it."""


def bench(
    main: Callable[..., Mapping[str, Any] | int | None],
    *,
    holds: Callable[[Any], bool] | None = None,
    **choices: Iterable[Any],
) -> NoReturn:
    """Call `main` with the options of the command line, keep what it returns, and exit.

    `main` returns a mapping to be written, or an exit status or None where it has written what
    there is, or is one arm in a process of its own. With `--no-result`, or an option `quick` of its
    own, nothing is written. `holds` says of a mapping whether the claim holds; None: nothing can
    be missed. `choices` are the values that an option of that name may have.
    """
    rest, options = _options(main, choices)
    is_kept = not options.pop("no_result") and not options.get("quick")
    began_s = time.perf_counter()
    found = main(*rest, **options)
    if found is None or isinstance(found, int):
        sys.exit(found)
    payload = {"seconds": round(time.perf_counter() - began_s, 1), **found}
    for key, value in payload.items():
        text = json.dumps(value)
        print(f"{key}: {text if len(text) <= LONGEST else text[:LONGEST] + ' ...'}")
    if is_kept:
        print(f"written: {write_result(_name(main), payload)}")
    if holds is not None and not holds(found):
        sys.exit("the claim does not hold")
    sys.exit()


def turns(arms: Iterable[Arm], repetitions: int) -> Iterator[tuple[int, Arm]]:
    """Each arm in each repetition, from 0; in every other one in the opposite order, so that what
    a machine does meanwhile meets all alike."""
    arms = list(arms)
    for number in range(repetitions):
        for arm in arms[:: -1 if number % 2 else 1]:
            yield number, arm


def in_process(file: str, *arguments: str, environ: Mapping[str, str] | None = None) -> Any:
    """Run a benchmark in a process of its own, and return the JSON of its last line.

    `environ` are variables beside this process's own. Raises `RuntimeError` with what it said if
    it fails.
    """
    command = [sys.executable, file, *arguments]
    environ = {**os.environ, **(environ or {})}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environ)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def rollpacker(*arguments: str) -> None:
    """Run the command line in a process of its own."""
    program = "import sys; from rollpacker.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", program, *arguments]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def metrics(run: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def pass_rates(run: Path) -> list[float]:
    """Held-out pass@1 of a run, from its first evaluation to its last."""
    return [row["eval/pass@1"] for row in metrics(run) if "eval/pass@1" in row]


def paired_interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """Mean, and its 95 % interval by Student's t."""
    mean = statistics.mean(differences)
    if len(differences) < 2:
        return mean, math.nan, math.nan
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    half = STUDENT_95[len(differences) - 1] * error
    return mean, mean - half, mean + half


STUDENT_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306}
"""Two-sided 95 % points by degrees of freedom."""


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table, as pages have it."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def earlier(main: Callable[..., Any], key: str) -> dict[str, Any]:
    """Return what the kept result of this benchmark has under a key; empty without a result."""
    path = RESULTS / f"{_name(main)}.json"
    return dict(json.loads(path.read_text())[key]) if path.is_file() else {}


def _name(main: Callable[..., Any]) -> str:
    return Path(inspect.getfile(main)).stem


def _options(
    main: Callable[..., Any], choices: Mapping[str, Iterable[Any]]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Arguments without a name, and options by name, of the command line."""
    parser = argparse.ArgumentParser(
        description=main.__globals__["__doc__"],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    rest = None
    for name, one in inspect.signature(main, eval_str=True).parameters.items():
        kind, many = _kind(one.annotation)
        told: dict[str, Any] = {"choices": [*choices[name]]} if name in choices else {}
        if one.kind is one.VAR_POSITIONAL:
            rest = name
            parser.add_argument(name, type=kind, nargs="*", **told)
        elif one.default is one.empty:
            parser.add_argument(name, type=kind, **told)
        elif kind is bool:
            parser.add_argument(_flag(name), action="store_true")
        else:
            told |= {"default": one.default, "help": f"default: {one.default}"}
            told |= {"nargs": "+"} if many else {}
            parser.add_argument(_flag(name), type=kind, **told)
    parser.add_argument("--no-result", action="store_true", help="write no result file")
    options = vars(parser.parse_args())
    return (options.pop(rest) if rest else ()), options


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _kind(annotation: Any) -> tuple[Any, bool]:
    """The type of one value of an option, and whether it has several."""
    if isinstance(annotation, types.UnionType):
        (annotation,) = (one for one in typing.get_args(annotation) if one is not type(None))
    if typing.get_origin(annotation) is not None:
        return typing.get_args(annotation)[0], True
    return annotation, False
