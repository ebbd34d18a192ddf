"""Several runs beside each other, for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollpacker.report.writing import clock, printable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

MAX_RUNS = 8
"""As many as a page has colours for."""
_MAX_SETTINGS = 40
_MAX_CHARS = 60
_MAX_KEY = 48
"""Columns that a setting's key has to itself; a longer one goes on below, never cut off."""

Run = Mapping[str, Any]
"""As `RunBook.plain` tells it."""


def render_comparison(runs: Sequence[Run]) -> RenderableType:
    """Results, seconds by cause, lengths and the settings in which the runs differ."""
    from rich.console import Group
    from rich.text import Text

    parts = [_results(runs), _seconds(runs)]
    differing = settings_that_differ(runs)
    if differing:
        longest = max(len(printable(key)) for key, _ in differing[:_MAX_SETTINGS])
        table = _table("settings that differ", runs, least=min(longest, _MAX_KEY))
        for key, values in differing[:_MAX_SETTINGS]:
            table.add_row(Text(printable(key)), *map(_shown, values))
        if len(differing) > _MAX_SETTINGS:
            table.add_row(f"... and {len(differing) - _MAX_SETTINGS} more, in the page")
        parts.append(table)
    return Group(*parts)


def settings_that_differ(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Keys with their value in each run, the runs' names left out."""
    own = [{key: value for key, value, _ in run["settings"]} for run in runs]
    defaults = {key: default for run in runs for key, _, default in run["settings"]}
    keys = dict.fromkeys(key for one in own for key in one if key != "name")
    found = []
    for key in keys:
        default = defaults[key]
        values = [one.get(key, "not set" if default is None else default) for one in own]
        if len(set(values)) > 1:
            found.append((key, values))
    return found


def _results(runs: Sequence[Run]) -> Table:
    table = _table("", runs)
    rows: list[tuple[str, Callable[[Run], str]]] = [
        ("steps", lambda run: f"{run['summary']['steps']['total']:,}"),
        ("finished", lambda run: str(run["summary"]["finished"] or "no")),
        ("wall time", lambda run: clock(run["summary"]["wall_s"])),
        ("held-out pass@1, first", lambda run: _number(_passes(run)[:1], 3)),
        ("held-out pass@1, last", lambda run: _number(_passes(run)[-1:], 3)),
        ("held-out pass@1, best", lambda run: _number(sorted(_passes(run))[-1:], 3)),
        ("last, minus the first run's (± s.e.)", _paired),
        ("training reward, first", lambda run: _of(run, "training_reward", "first")),
        ("training reward, last", lambda run: _of(run, "training_reward", "last")),
        ("mean step s", lambda run: _of(run, "steps", "mean_step_s")),
        ("mean rollout s", lambda run: _of(run, "steps", "mean_rollout_s")),
        ("tokens trained on", lambda run: f"{run['summary']['tokens']['trained']:,}"),
        ("trained tokens per s", _speed),
        (
            "mean length trained, last 50 steps",
            lambda run: _of(run, "lengths", "trained_mean", 1),
        ),
        ("the policy's own length", lambda run: _of(run, "lengths", "policy_mean", 1)),
    ]
    if not any(run.get("paired") for run in runs):
        rows = [row for row in rows if row[1] is not _paired]
    for name, tell in rows:
        table.add_row(name, *(_shown(tell(run)) for run in runs))
    return table


def _seconds(runs: Sequence[Run]) -> Table:
    table = _table("where the seconds went", runs)
    for cause in runs[0]["causes"]:
        spent = [run["summary"]["seconds"].get(cause) for run in runs]
        if all(seconds is None for seconds in spent):
            continue  # a summary leaves out what no program did
        cells = []
        for run, seconds in zip(runs, spent, strict=True):
            share = 100 * (seconds or 0.0) / (run["summary"]["wall_s"] or 1.0)
            cells.append(f"{seconds or 0.0:,.2f} ({share:.0f} %)")
        table.add_row(cause.replace("_", " "), *cells)
    table.add_row("all", *(f"{run['summary']['wall_s']:,.2f}" for run in runs), style="bold")
    return table


def _table(title: str, runs: Sequence[Run], *, least: int | None = None) -> Table:
    """`least`: columns of the first column, whatever the others want."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(Text(title), overflow="fold", min_width=least)
    for run in runs:
        table.add_column(_shown(run["name"]), justify="right", overflow="fold")
    return table


def _shown(text: str) -> Any:
    """Neither markup nor an escape of the terminal, whatever a run was called."""
    from rich.text import Text

    clean = printable(text)
    return Text(clean if len(clean) <= _MAX_CHARS else f"{clean[: _MAX_CHARS - 1]}…")


def _passes(run: Run) -> list[float]:
    known = [row.get("eval/pass@1") for row in run["summary"]["evaluations"]]
    return [value for value in known if value is not None]


def _paired(run: Run) -> str:
    """With its standard error, where both runs evaluated the same prompts (see `paired.py`)."""
    found = run.get("paired")
    if not found:
        return "-"
    error = "" if found["error"] is None else f" ± {found['error']:.3f}"
    return f"{found['difference']:+.3f}{error} ({found['prompts']:,} prompts)"


def _speed(run: Run) -> str:
    steps = run["summary"]["steps"]
    seconds = (steps["mean_step_s"] or 0.0) * steps["total"]
    return f"{run['summary']['tokens']['trained'] / seconds:,.0f}" if seconds else "-"


def _of(run: Run, part: str, name: str, digits: int = 3) -> str:
    value = run["summary"][part][name]
    return "-" if value is None else f"{value:,.{digits}f}"


def _number(values: Sequence[float], digits: int) -> str:
    return f"{values[0]:,.{digits}f}" if values else "-"
