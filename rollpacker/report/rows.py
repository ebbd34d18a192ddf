"""A small table of rows of a run, such as its metrics: a row by its number, a column by its name. A
notebook shows it as HTML."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

from rollpacker.imports import require
from rollpacker.writing import printable

NUM_SHOWN = 5
"""Number of first rows, and of last rows, of a table that a notebook shows."""
MAX_SHOWN_COLUMNS = 8
MAX_CELL = 60
"""Maximum number of characters of a table's cell that a notebook shows."""


class Table(Sequence[Mapping[str, Any]]):
    """A read-only table: `table[3]` is a row as a mapping, `table["reward"]` a column as a list,
    with None where a row has no such value. `to_pandas` makes a DataFrame."""

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        *,
        name: str = "rows",
        first: Sequence[str] = (),
        of_metrics: bool = False,
    ) -> None:
        """`rows`: each row's values by column. `first`: columns that a notebook shows first.
        `of_metrics`: columns are metrics; an error names the column for another framework's
        name."""
        self._rows = rows
        self._name = name
        self._first = first
        self._of_metrics = of_metrics
        self.columns = tuple(dict.fromkeys(column for row in rows for column in row))
        """Names of all columns, in the order in which they first appear in a row."""

    @overload
    def __getitem__(self, place: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, place: slice) -> Table: ...
    @overload
    def __getitem__(self, place: str) -> list[Any]: ...
    def __getitem__(self, place: int | slice | str) -> Mapping[str, Any] | Table | list[Any]:
        """Returns a row by its number, a table by a slice, or a column by its name. Raises
        `KeyError` for a column that no row has."""
        if isinstance(place, slice):
            return Table(
                self._rows[place], name=self._name, first=self._first, of_metrics=self._of_metrics
            )
        if isinstance(place, int):
            return self._rows[place]
        if place not in self.columns:
            raise KeyError(f"there is no column {place}.{self._meant(place)}")
        return [row.get(place) for row in self._rows]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self._rows)

    def _meant(self, name: str) -> str:
        from rollpacker.did_you_mean import did_you_mean
        from rollpacker.report.metrics import here_it_is

        of_others = here_it_is(name, self.columns) if self._of_metrics else ""
        return of_others or did_you_mean(name, self.columns)

    def _ipython_key_completions_(self) -> list[str]:
        return list(self.columns)

    def to_pandas(self) -> Any:
        """The table as a pandas DataFrame. Raises `MissingPackageError` without pandas."""
        require("pandas", extra="notebook", what="a table as a DataFrame")
        import pandas

        return pandas.DataFrame(list(self._rows), columns=list(self.columns))

    def __repr__(self) -> str:
        return f"<{len(self)} {self._name}, {len(self.columns)} columns>"

    def _repr_html_(self) -> str:
        columns = [column for column in self._first if column in self.columns]
        columns += [c for c in self.columns if c not in columns][: MAX_SHOWN_COLUMNS - len(columns)]
        rows = list(self._rows)
        cut = len(rows) > 2 * NUM_SHOWN
        shown = rows[:NUM_SHOWN] + rows[-NUM_SHOWN:] if cut else rows
        lines = [
            "".join(f"<td>{_cell(row.get(column))}</td>" for column in columns) for row in shown
        ]
        if cut:
            lines.insert(NUM_SHOWN, f'<td colspan="{len(columns)}">...</td>')
        head = "".join(f"<th>{_cell(column)}</th>" for column in columns)
        body = "".join(f"<tr>{line}</tr>" for line in lines)
        more = len(self.columns) - len(columns)
        note = f", {more} more columns" if more > 0 else ""
        return (
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
            f"<p>{len(rows)} {html.escape(self._name)}{note}</p>"
        )


def _cell(value: Any) -> str:
    """A value as the HTML text of a cell: escaped, on one line, cut to `MAX_CELL` characters, with
    control characters made visible."""
    if value is None:
        return ""
    text = f"{value:.4g}" if isinstance(value, float) else printable(str(value))
    return html.escape(text if len(text) <= MAX_CELL else text[: MAX_CELL - 3] + "...")
