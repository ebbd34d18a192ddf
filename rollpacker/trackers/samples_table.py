"""What a step trained on, as a table for a page that somebody else's program draws."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_ROWS = 64
MAX_CHARACTERS = 8000

_LINES = "\n\t"
_UNSEEN = {"Cc", "Cs", "Co", "Cn"}
"""Categories of Unicode that no page shows as what they are."""
_DIRECTIONS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f")
"""They reorder what stands around them."""


@dataclass(frozen=True, slots=True)
class SamplesTable:
    """Every row has a value for each column: a number, a text or None."""

    columns: list[str]
    rows: list[list[float | str | None]]


def samples_table(samples: Sequence[Mapping[str, Any]]) -> SamplesTable | None:
    """The first `MAX_ROWS` samples with inert texts; None if there are none."""
    if not samples:
        return None
    shown = samples[:MAX_ROWS]
    columns = list(dict.fromkeys(key for sample in shown for key in sample))
    return SamplesTable(columns, [[_cell(sample.get(c)) for c in columns] for sample in shown])


def _cell(value: Any) -> float | str | None:
    if value is None or isinstance(value, int | float):
        return value
    if not isinstance(value, str):
        value = json.dumps(value, ensure_ascii=False, default=str)
    return visible(value)


def visible(text: str) -> str:
    """`text` with control characters and lone surrogates written out, such as `\\x1b`, and cut to
    `MAX_CHARACTERS`. Line ends and tabs stay."""
    rest = len(text) - MAX_CHARACTERS
    shown = "".join(_shown(character) for character in text[:MAX_CHARACTERS])
    return f"{shown} ... ({rest} more characters)" if rest > 0 else shown


def _shown(character: str) -> str:
    if character in _LINES:
        return character
    if unicodedata.category(character) in _UNSEEN or character in _DIRECTIONS:
        return character.encode("unicode_escape", "surrogatepass").decode("ascii")
    return character
