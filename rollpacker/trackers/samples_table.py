"""Makes a table of a step's samples, with no character that is invisible on a web page."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

MAX_ROWS = 64
MAX_CHARACTERS = 8000

_UNSEEN = {"Cc", "Cs", "Co", "Cn"}
"""Categories of Unicode characters that are invisible, or have no fixed meaning, on a page."""
_DIRECTIONS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f")
"""Characters that change the direction in which the text around them is written."""


class SamplesTable(NamedTuple):
    """A table in which every row has a value for each column: a number, a text or None."""

    columns: list[str]
    rows: list[list[float | str | None]]


def samples_table(samples: Sequence[Mapping[str, Any]]) -> SamplesTable | None:
    """A table of the first `MAX_ROWS` of a step's samples (values by column), whose texts are as
    `visible` returns them. None: there are no samples."""
    shown = samples[:MAX_ROWS]
    columns = list(dict.fromkeys(key for sample in shown for key in sample))
    rows = [[_cell(sample.get(column)) for column in columns] for sample in shown]
    return SamplesTable(columns, rows) if rows else None


def _cell(value: Any) -> float | str | None:
    if value is None or isinstance(value, int | float):
        return value
    is_text = isinstance(value, str)
    return visible(value if is_text else json.dumps(value, ensure_ascii=False, default=str))


def visible(text: str) -> str:
    r"""The text with control characters and lone surrogates written out, such as `\x1b`, and cut to
    `MAX_CHARACTERS`. Line ends and tabs stay."""
    rest = len(text) - MAX_CHARACTERS
    shown = "".join(map(_shown, text[:MAX_CHARACTERS]))
    return f"{shown} ... ({rest} more characters)" if rest > 0 else shown


def _shown(character: str) -> str:
    is_unseen = unicodedata.category(character) in _UNSEEN or character in _DIRECTIONS
    if not is_unseen or character in "\n\t":
        return character
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
