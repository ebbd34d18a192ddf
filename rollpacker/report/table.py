"""Every table that the package shows in a terminal or a pipe, made with rich.

A table has a first column of names and further columns of numbers. `table` makes a table for a
console, which folds long cells; `lines` makes plain lines of any length, for commands whose output
other programs read. rich is imported when a table is made, since commands without a table must
start at once.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollpacker.writing import printable

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

MAX_WIDTH = 100
"""Maximum number of characters of a terminal's line that tables use."""
_RULE = "    \n" * 2 + " -- \n" + "    \n" * 5
"""A box for tables, in rich's notation: only a line of hyphens below the head."""


def table(*heads: str, expand: bool = True, dense: bool = False) -> Table:
    """An empty table with these heads of columns. `expand`: the table is as wide as the console,
    with the spare room in the first column. `dense`: no line below the head, and one blank between
    columns."""
    from rich import box
    from rich.table import Table

    made = Table(
        box=None if dense else box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1 if dense else 2, 0, 0),
        header_style="dim" if dense else "bold",
        expand=expand,
    )
    for number, head in enumerate(heads):
        made.add_column(
            text(head),
            justify="right" if number else "left",
            no_wrap=number > 0,
            overflow="fold",
            ratio=None if number or not expand else 1,
        )
    return made


def table_of(
    title: str, rows: Mapping[str, Mapping[str, Any]], columns: Mapping[str, tuple[str, int | str]]
) -> Table:
    """A table headed `title` with a row for each name in `rows`. `columns` maps each further head
    to the key of a row's value and the format for `cell`."""
    made = table(title, *columns)
    for name, one in rows.items():
        made.add_row(text(name), *(cell(one[key], shown) for key, shown in columns.values()))
    return made


def lines(
    rows: Sequence[Sequence[str]],
    *,
    numbers: bool = True,
    rule: bool = True,
    gap: int | None = None,
) -> list[str]:
    """The rows as lines of text in aligned columns, without colours, of any width. `numbers`: all
    columns but the first are aligned to the right. `rule`: the first row is a head, with a line of
    hyphens below. `gap`: blanks between columns; None: three, or one in lines longer than
    `MAX_WIDTH`."""
    from rich.box import Box
    from rich.console import Console
    from rich.table import Table

    if gap is None:
        width = sum(max(map(len, column)) for column in zip(*rows, strict=True))
        gap = 3 if width + 3 * (len(rows[0]) - 1) <= MAX_WIDTH else 1
    made = Table(
        box=Box(_RULE, ascii=True) if rule else None,
        show_header=rule,
        show_edge=False,
        pad_edge=False,
        padding=(0, gap - rule, 0, 0),  # the box itself has a blank between columns
        header_style="",
    )
    for place in range(len(rows[0])):
        head = text(rows[0][place]) if rule else ""
        made.add_column(head, justify="right" if numbers and place else "left", no_wrap=True)
    for row in rows[rule:]:
        made.add_row(*map(text, row))
    file = io.StringIO()
    Console(file=file, width=10_000, color_system=None, force_terminal=False).print(made)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def text(of: str) -> Text:
    """A rich text of the string `of`, in which markup and escape sequences have no effect."""
    from rich.text import Text

    return Text(printable(of))


def cell(value: Any, shown: int | str = 3) -> str:
    """A value as the text of a table's cell; a mapping as the sum of its values. `shown`: the
    number of decimals, `%` for a share in percent, or `ms` for seconds in milliseconds. None and
    numbers that are not finite become `-`."""
    if isinstance(value, Mapping):
        value = sum(value.values())
    if value is None or not math.isfinite(value):
        return "-"
    if shown == "%":
        return f"{100 * value:.0f} %"
    return f"{1e3 * value:,.1f}" if shown == "ms" else f"{value:,.{shown}f}"
