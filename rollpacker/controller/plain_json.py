"""Whatever data, models and environments hold, as JSON that people can read."""

from __future__ import annotations

import json
from typing import Any

_MAX_REPR = 4096
"""Characters of what JSON does not have."""


def plain_text(value: Any) -> str:
    """Readable JSON, whatever `value` holds."""
    try:
        return json.dumps(value, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError):  # keys that JSON lacks; a circle
        try:
            told = repr(value)[:_MAX_REPR]
        except Exception as error:  # nested too deeply, or a __repr__ that fails
            told = f"({type(error).__name__}: it cannot be shown)"
        return json.dumps(told, ensure_ascii=False)


def _plain(value: Any) -> Any:
    to_list = getattr(value, "tolist", None)  # arrays, and numpy's numbers
    if callable(to_list):
        return to_list()
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)


def shortened(value: Any, most: int) -> Any:
    """The value, or where it is longer than `most` characters its text, cut off, which says so."""
    if isinstance(value, int | float | None):  # the most, and short
        return value
    text = value if isinstance(value, str) else plain_text(value)
    if len(text) <= most:
        return value
    return f"{text[:most]}… ({len(text)} characters)"
