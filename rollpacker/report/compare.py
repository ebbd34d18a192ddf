"""Compares several runs in tables for a terminal: results, seconds by cause, and differences of
settings and of the user's own code."""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollpacker.report.page.settings import Setting, read_settings
from rollpacker.report.summary import with_paths
from rollpacker.report.table import cell, table, text
from rollpacker.report.time_book import CAUSES
from rollpacker.writing import clock, printable

if TYPE_CHECKING:
    from rich.console import RenderableType

logger = logging.getLogger(__name__)

IDENTITY_FILE = "identity.json"
MAX_RUNS = 8
_MAX_CHARS = 200
"""Maximum number of characters that are shown of a setting's value. A longer value is cut off,
followed by the number of all its characters."""
_MAX_COLUMN = 30
"""Maximum width in characters of a run's column in a table. Longer values are folded."""
_LEAST_COLUMN = 12
"""Fewest characters that a run's column keeps when the names of rows are long."""
_MAX_NAME = 28
"""Maximum width in characters of the column of rows' names, where the console is narrow."""
_MAX_KEY = 48
"""Maximum width in characters of the column of settings' keys, where the console is narrow. It is
wider than that of other names of rows, since users search for whole keys."""
_GAP = 3
"""Number of characters between two columns of a table."""
_SHOWN_DIGITS = 8
"""Number of first digits of a SHA-256 that are shown."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One of the runs that are compared, with what its folder tells."""

    folder: Path
    summary: Mapping[str, Any]
    """The run's summary, as `summary.json` has it."""
    settings: Mapping[str, Setting]
    """The run's settings that differ from their defaults, by key. Empty if they are not known."""
    passed: Mapping[tuple[str, str], float]
    """Share of passed responses for each prompt, by the prompt's id and text, in the last
    evaluation with saved answers. Prompts without verdicts are missing; empty if no answers were
    saved. An id alone is not enough, since another data set may have the same ids."""
    digests: Mapping[str, str | None] = field(default_factory=dict)
    """SHA-256 of the source file of each function of the user's. A key is the setting that names
    the function, or "the reward NAME". None: not known. Empty if the run did not record them."""

    @property
    def name(self) -> str:
        return str(self.summary["run"])


def read_compared(folder: Path, summary: Mapping[str, Any]) -> Compared:
    """Reads a run for the comparison: `summary` is the run's summary, and the rest comes from other
    files in the run's folder."""
    return Compared(
        folder,
        with_paths(summary, folder),
        {one.key: one for one in read_settings(folder)[0]},
        _last_passed(folder),
        _digests(folder),
    )


def render_comparison(runs: Sequence[Compared], *, width: int | None = None) -> RenderableType:
    """The tables of the comparison in lines of `width` characters (None: as many as needed). A text
    that does not fit goes on in the next line, and runs that do not fit side by side are shown
    below each other."""
    from rich.console import Group

    settings = [*settings_that_differ(runs), *code_that_differs(runs)]
    return Group(
        *_tables("", runs, _results(runs), width),
        *_tables("where the seconds went", runs, _seconds(runs), width),
        *_tables("settings that differ", runs, settings, width, max_name=_MAX_KEY),
    )


Rows = Sequence[tuple[str, Sequence[str]]]
"""Rows of a table: pairs of the row's name and a cell for each run."""


def settings_that_differ(runs: Sequence[Compared]) -> Rows:
    """A row for each setting that is not the same in all runs, with its value in each run. The
    setting `name` is left out."""
    defaults = {key: one.default for run in runs for key, one in run.settings.items()}
    found = []
    for key, default in defaults.items():
        other = "not set" if default is None else default
        values = [run.settings[key].value if key in run.settings else other for run in runs]
        if key != "name" and len(set(values)) > 1:
            found.append((key, [_cut(value) for value in values]))
    return found


def code_that_differs(runs: Sequence[Compared]) -> Rows:
    """A row for each function of the user's whose source file differs between runs (settings may be
    the same). A cell has the file and the first digits of its SHA-256, or "not known"."""
    found = []
    for name in dict.fromkeys(name for run in runs for name in run.digests):
        digests = [run.digests.get(name) for run in runs]
        if len({one for one in digests if one is not None}) > 1:
            cells = [_file(name, of, run) for of, run in zip(digests, runs, strict=True)]
            found.append((f"the code of {name}", cells))
    return found


def _digests(folder: Path) -> dict[str, str | None]:
    try:
        found = json.loads((folder / IDENTITY_FILE).read_text("utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return dict(found) if isinstance(found, dict) else {}


def _file(name: str, digest: str | None, run: Compared) -> str:
    if digest is None:
        return "not known"
    settings = {key: one.value for key, one in run.settings.items()}
    place = settings.get(name) or _place_of_reward(name.removeprefix("the reward "), settings)
    return f"{place.rpartition(':')[0]} ({digest[:_SHOWN_DIGITS]})".lstrip()


def _place_of_reward(name: str, settings: Mapping[str, str]) -> str:
    """The place of a reward function in the user's code ("file:function"), found in `settings` by
    the reward's `name`. Empty if no reward has this name."""
    for key, place in settings.items():
        if key.startswith("rewards.") and key.endswith(".function"):
            given = settings.get(f"{key.removesuffix('function')}name")
            if name == (given or place.rpartition(":")[2]):
                return place
    return ""


def _results(runs: Sequence[Compared]) -> Rows:
    rows: list[tuple[str, Callable[[Mapping[str, Any]], str]]] = [
        ("steps", lambda of: f"{of['steps']['total']:,}"),
        ("finished", _end),
        ("wall time", lambda of: clock(of["wall_s"])),
        ("held-out pass@1, first", lambda of: cell(next(iter(_passes(of)), None))),
        ("held-out pass@1, last", lambda of: cell(next(reversed(_passes(of)), None))),
        ("held-out pass@1, best", lambda of: cell(max(_passes(of), default=None))),
        ("training reward, first", lambda of: cell(of["training_reward"]["first"])),
        ("training reward, last", lambda of: cell(of["training_reward"]["last"])),
        ("mean step s", lambda of: cell(of["steps"]["mean_step_s"])),
        ("mean rollout s", lambda of: cell(of["steps"]["mean_rollout_s"])),
        ("tokens trained on", lambda of: f"{of['tokens']['trained']:,}"),
        ("trained tokens per s", _speed),
        ("mean length trained, last 50 steps", lambda of: cell(of["lengths"]["trained_mean"], 1)),
        ("the policy's own length", lambda of: cell(of["lengths"]["policy_mean"], 1)),
    ]
    found = [(name, [tell(run.summary) for run in runs]) for name, tell in rows]
    paired = [paired_difference(runs[0], run) for run in runs[1:]]
    if any(paired):
        name = "last, minus the first run's (± s.e. over prompts, not over seeds)"
        found.insert(6, (name, ["-", *("-" if one is None else str(one) for one in paired)]))
    return found


def _end(summary: Mapping[str, Any]) -> str:
    return f"failed: {summary['failed']}" if "failed" in summary else summary["finished"] or "no"


def _passes(summary: Mapping[str, Any]) -> list[float]:
    known = [row.get("eval/pass@1") for row in summary["evaluations"]]
    return [value for value in known if value is not None]


def _speed(summary: Mapping[str, Any]) -> str:
    steps = summary["steps"]
    seconds = (steps["mean_step_s"] or 0.0) * steps["total"]
    return cell(summary["tokens"]["trained"] / seconds if seconds else None, 0)


def _seconds(runs: Sequence[Compared]) -> Rows:
    rows = []
    for cause in CAUSES:
        if not any(cause in run.summary["seconds"] for run in runs):
            continue  # a summary leaves out what no program did
        cells = []
        for run in runs:
            seconds = run.summary["seconds"].get(cause, 0.0)
            share = seconds / (run.summary["wall_s"] or 1.0)
            cells.append(f"{seconds:,.2f} ({cell(share, '%')})")
        rows.append((cause.replace("_", " "), cells))
    return [*rows, ("all", [f"{run.summary['wall_s']:,.2f}" for run in runs])]


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """The difference of two runs' held-out pass@1, taken for each prompt and then averaged.

    Prompts differ far more than runs do. If both runs answered the same prompts, the difference on
    each prompt has a much smaller error than the difference of two averages."""

    mean: float
    error: float | None
    """Standard error of `mean` over the prompts. None for a single prompt."""
    prompts: int

    def __str__(self) -> str:
        error = "" if self.error is None else f" ± {self.error:.3f}"
        return f"{self.mean:+.3f}{error} ({self.prompts:,} prompts)"


def paired_difference(first: Compared, other: Compared) -> PairedDifference | None:
    """The pass@1 of `other` minus that of `first` in their last evaluations, over the prompts that
    both runs answered. None if there are no such prompts."""
    base = first.passed
    differences = [share - base[prompt] for prompt, share in other.passed.items() if prompt in base]
    if not differences:
        return None
    num = len(differences)
    error = statistics.stdev(differences) / math.sqrt(num) if num > 1 else None
    return PairedDifference(statistics.fmean(differences), error, num)


def _last_passed(folder: Path) -> dict[tuple[str, str], float]:
    """Reads the value of `Compared.passed` from a run's folder. A file that cannot be read counts
    as missing, with a warning."""
    import pyarrow.parquet

    paths = sorted((folder / "evaluations").glob("step_*.parquet"))
    if not paths:
        return {}
    names = ["prompt_id", "prompt", "passed"]
    try:
        rows = pyarrow.parquet.read_table(paths[-1], columns=names).to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError, KeyError) as error:
        logger.warning("%s cannot be read: %s", paths[-1], str(error).split("\n")[0])
        return {}
    passed: dict[tuple[str, str], list[bool]] = {}
    for row in rows:
        if row["passed"] is not None:
            passed.setdefault((row["prompt_id"], row["prompt"] or ""), []).append(row["passed"])
    return {prompt: statistics.fmean(of_prompt) for prompt, of_prompt in passed.items()}


def _tables(
    title: str,
    runs: Sequence[Compared],
    rows: Rows,
    width: int | None,
    *,
    max_name: int = _MAX_NAME,
) -> Iterator[RenderableType]:
    """Yields tables with these `rows` below `title`, each with as many of the `runs` as fit side by
    side in `width` characters (None: all). Yields nothing if there are no rows."""
    if not rows:
        return
    heads = [printable(run.name) for run in runs]
    longest = [
        max(len(head), *(len(printable(cells[place])) for _, cells in rows))
        for place, head in enumerate(heads)
    ]
    wanted = [min(one, _MAX_COLUMN) for one in longest]
    name = max(len(title), *(len(printable(name)) for name, _ in rows))
    if width is None:
        wanted, width = longest, name + sum(longest) + _GAP * len(runs)
    if name + sum(wanted) + _GAP * len(runs) > width:
        name = max(1, min(name, max_name, width - _LEAST_COLUMN - _GAP))
    first = 0
    while first < len(runs):
        end = first + 1
        while (
            end < len(runs)
            and name + sum(wanted[first : end + 1]) + _GAP * (end + 1 - first) <= width
        ):
            end += 1
        made = table(title, *heads[first:end], expand=False)
        made.show_edge = False  # a line is as long as its columns
        for column, of in zip(made.columns, (name, *wanted[first:end]), strict=True):
            column.width, column.no_wrap = max(1, min(of, width - name - _GAP)), False
        made.columns[0].width = name
        for row, cells in rows:
            style = "bold" if row == "all" else None
            made.add_row(text(row), *map(text, cells[first:end]), style=style)
        yield made
        yield ""
        first = end


def _cut(value: str) -> str:
    if len(value) <= _MAX_CHARS:
        return value
    return f"{value[:_MAX_CHARS]}… ({len(value):,} characters)"
