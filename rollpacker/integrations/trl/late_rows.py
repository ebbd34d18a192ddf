"""A data set whose rows are chosen only when they are read.

TRL's data loader draws a step's rows before the step before has been trained on, so responses made
when a row is drawn would come from old weights. So only places are drawn here: a `LateRow` finds
out which row it stands for when TRL first reads one of its columns, right before the step's
responses are generated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from datasets import Dataset

Row = dict[str, Any]
"""A row of the user's data: values by column."""


class LateRows:
    """The rows of one generation (request for responses), chosen when the first of them is read.
    TRL draws a batch once for each time that it trains on it, but reads it once; no rows are chosen
    for a batch that is never read."""

    def __init__(self, count: int, decide: Callable[[], list[Row]]) -> None:
        self._count = count
        self._decide = decide
        self._rows: list[Row] | None = None

    def __getitem__(self, place: int) -> Row:
        if self._rows is None:
            self._rows = self._decide()
            found = len(self._rows)
            assert found == self._count, f"{found} samples for a batch of {self._count}"
        return self._rows[place]


class LateRow:
    """A row as TRL and its rewards use it, which is chosen when it is first read. It is no
    `Mapping`, since the data loader would copy one, and thereby read it too early."""

    __slots__ = ("_place", "_rows")

    def __init__(self, rows: LateRows, place: int) -> None:
        self._rows = rows
        self._place = place

    def __getitem__(self, column: str) -> Any:
        return self._rows[self._place][column]

    def __setitem__(self, column: str, value: Any) -> None:
        self._rows[self._place][column] = value

    def __contains__(self, column: object) -> bool:
        return column in self._rows[self._place]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows[self._place])

    def get(self, column: str, default: Any = None) -> Any:
        return self._rows[self._place].get(column, default)


class LateDataset(Dataset):  # type: ignore[misc]
    """The user's data set, except that a data loader gets `LateRow`s, not rows."""

    @classmethod
    def of(cls, dataset: Dataset, decide: Callable[[], list[Row]]) -> LateDataset:
        """The data set with rows chosen late: `decide` chooses and returns the rows of the next
        request for responses."""
        late = cls.__new__(cls)
        late.__dict__.update(dataset.__dict__)
        late._decide = decide
        return late

    def __getitems__(self, keys: Sequence[int]) -> list[LateRow]:  # torch asks for batches so
        rows = LateRows(len(keys), self._decide)
        return [LateRow(rows, place) for place in range(len(keys))]
