"""Several runs beside each other, for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollpacker.report.page.seeds import SeedGroup
from rollpacker.report.table import table, text
from rollpacker.report.writing import clock, printable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

MAX_RUNS = 8
"""As many as a page has colours for."""
_MAX_SETTINGS = 40
_MAX_CHARS = 200
"""Of a setting's value; what is left out is counted."""
_MAX_COLUMN = 60
_MAX_KEY = 48
"""Characters of a line that a setting's key has to itself; a longer one goes on below."""
_LEAST_KEY = 24
_LEAST_COLUMN = 12
"""So narrow a run's column gets before fewer runs stand beside each other."""
_GAP = 3
"""Between two columns: two spaces and the line's own."""

Run = Mapping[str, Any]
"""As `RunBook.plain` tells it."""
Rows = Sequence[tuple[str, Sequence[str]]]
"""The name of each, and a cell for each run."""


def render_comparison(
    runs: Sequence[Run], groups: Sequence[SeedGroup] = (), *, width: int | None = None
) -> RenderableType:
    """Results, seconds by cause, lengths and the settings in which the runs differ, in lines of
    `width` characters (None: as many as they need). Nothing is cropped: what does not fit goes on
    in the next line, and runs that do not fit beside each other stand below each other."""
    from rich.console import Group

    parts: list[RenderableType]
    parts = [*_tables("", runs, _results(runs), width), *_groups(groups, width)]
    parts += _tables("where the seconds went", runs, _seconds(runs), width)
    differing = settings_that_differ(runs)
    if differing:
        rows = [(key, [_cut(value) for value in of]) for key, of in differing[:_MAX_SETTINGS]]
        parts += _tables("settings that differ", runs, rows, width, least_key=_MAX_KEY)
        if len(differing) > _MAX_SETTINGS:
            more = len(differing) - _MAX_SETTINGS
            parts.append(text(f"... and {more} more settings that differ, in the page"))
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


def _results(runs: Sequence[Run]) -> Rows:
    rows: list[tuple[str, Callable[[Run], str]]] = [
        ("steps", lambda run: f"{run['summary']['steps']['total']:,}"),
        ("finished", _end),
        ("wall time", lambda run: clock(run["summary"]["wall_s"])),
        ("held-out pass@1, first", lambda run: _number(_passes(run)[:1], 3)),
        ("held-out pass@1, last", lambda run: _number(_passes(run)[-1:], 3)),
        ("held-out pass@1, best", lambda run: _number(sorted(_passes(run))[-1:], 3)),
        ("last, minus the first run's (± s.e. over prompts, not over seeds)", _paired),
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
    return [(name, [tell(run) for run in runs]) for name, tell in rows]


def _end(run: Run) -> str:
    summary = run["summary"]
    return f"failed: {summary['failed']}" if "failed" in summary else summary["finished"] or "no"


def _seconds(runs: Sequence[Run]) -> Rows:
    rows = []
    for cause in runs[0]["causes"]:
        spent = [run["summary"]["seconds"].get(cause) for run in runs]
        if all(seconds is None for seconds in spent):
            continue  # a summary leaves out what no program did
        cells = []
        for run, seconds in zip(runs, spent, strict=True):
            share = 100 * (seconds or 0.0) / (run["summary"]["wall_s"] or 1.0)
            cells.append(f"{seconds or 0.0:,.2f} ({share:.0f} %)")
        rows.append((cause.replace("_", " "), cells))
    return [*rows, ("all", [f"{run['summary']['wall_s']:,.2f}" for run in runs])]


def _groups(groups: Sequence[SeedGroup], width: int | None) -> Iterator[RenderableType]:
    if not groups:
        return
    names = [{"name": ", ".join(group.names)} for group in groups]
    rows = [
        ("runs", [f"{len(group.names):,}" for group in groups]),
        ("seeds", [f"{group.seeds:,}" for group in groups]),
        ("last evaluation, after step", [group.told_steps for group in groups]),
        ("its pass@1, mean over seeds", [_number(group.means, 3) for group in groups]),
        ("standard deviation over seeds", [_number(group.deviations, 3) for group in groups]),
        (
            "minus the first group's (± s.e. over seeds)",
            [group.told_difference for group in groups],
        ),
    ]
    yield from _tables("the same settings, other seeds", names, rows, width)


def _tables(
    title: str,
    runs: Sequence[Run],
    rows: Rows,
    width: int | None,
    *,
    least_key: int = _LEAST_KEY,
) -> Iterator[RenderableType]:
    """As many tables below each other as the width asks for, each with some of the runs."""
    shown = [(printable(name), [printable(cell) for cell in cells]) for name, cells in rows]
    heads = [printable(run["name"]) for run in runs]
    key = max(map(len, (title, *(name for name, _ in shown))))
    wanted = [
        min(max(map(len, (head, *(cells[place] for _, cells in shown)))), _MAX_COLUMN)
        for place, head in enumerate(heads)
    ]
    if width is None or key + sum(wanted) + _GAP * len(wanted) <= width:
        yield _table(title, heads, shown, key, wanted)
        yield ""
        return
    key = min(key, least_key, max(width - _LEAST_COLUMN - _GAP, 1))
    room = width - key
    first = 0
    while first < len(heads):
        end, taken = first, 0
        while end < len(heads):
            taken += min(wanted[end], _LEAST_COLUMN) + _GAP
            if taken > room and end > first:
                break
            end += 1
        widths = _shares(wanted[first:end], room - _GAP * (end - first))
        some = [(name, cells[first:end]) for name, cells in shown]
        yield _table(title, heads[first:end], some, key, widths)
        yield ""
        first = end


def _shares(wanted: Sequence[int], room: int) -> list[int]:
    """What each column gets of the room: all that it wants, or what is left for each."""
    widths = [1] * len(wanted)
    for left, place in enumerate(sorted(range(len(wanted)), key=wanted.__getitem__)):
        widths[place] = max(1, min(wanted[place], room // (len(wanted) - left)))
        room -= widths[place]
    return widths


def _table(title: str, heads: Sequence[str], rows: Rows, key: int, widths: Sequence[int]) -> Table:
    """Texts in columns of these widths."""
    made = table(title, *heads, expand=False)
    made.show_edge = False  # a line is as long as its columns
    for column, width in zip(made.columns, (key, *widths), strict=True):
        column.width, column.no_wrap = width, False
    for name, cells in rows:
        made.add_row(text(name), *map(text, cells), style="bold" if name == "all" else None)
    return made


def _cut(value: str) -> str:
    if len(value) <= _MAX_CHARS:
        return value
    return f"{value[:_MAX_CHARS]}… ({len(value):,} characters)"


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
