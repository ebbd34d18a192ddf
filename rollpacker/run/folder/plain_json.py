"""Turns any values of data, models and environments into readable JSON."""

from __future__ import annotations

import json
from typing import Any

_MAX_REPR = 4096
"""Number of characters after which the `repr` of a value that JSON cannot hold is cut off."""


def plain_text(value: Any) -> str:
    """Returns the value as readable JSON; what JSON cannot hold appears as its `repr`."""
    text = _json(value)
    return json.dumps(_shown(value), ensure_ascii=False) if text is None else text


def _json(value: Any) -> str | None:
    """Returns the value as JSON text, or None if JSON cannot hold it."""
    try:
        return json.dumps(value, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError):  # keys that JSON lacks; a circle
        return None


def _shown(value: Any) -> str:
    try:
        return repr(value)[:_MAX_REPR]
    except Exception as error:  # nested too deeply, or a __repr__ that fails
        return f"({type(error).__name__}: it cannot be shown)"


def _plain(value: Any) -> Any:
    to_list = getattr(value, "tolist", None)  # arrays, and numpy's numbers
    if callable(to_list):
        return to_list()
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)


def shortened(value: Any, most: int) -> Any:
    """Returns the value. If its text is longer than `most` characters: that text, cut off, with a
    note of the full length."""
    if isinstance(value, int | float | None):  # the most, and short
        return value
    text = value if isinstance(value, str) else _json(value)
    if text is None:
        return _shown(value)[:most]
    if len(text) <= most:
        return value
    return f"{text[:most]}… ({len(text)} characters)"
