"""Turns what a reward function returned or raised into plain values for JSON. Runs in its worker.

A value is a number, None (the reward does not apply), or `{"why": ..., "kind": ...}` for no
verdict.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_REWARD = 1e30
"""Largest absolute value of a reward. Up to this, sums and squares stay finite in float64, and
advantages in float32."""

_PACKAGE = Path(__file__).parents[2]
_MAX_LINES = 4000

Value = float | dict[str, str] | None


class WrongReturn(Exception):
    """A function returned something that its framework does not allow. The message says what."""


def values_of(shape: str, returned: Any, count: int) -> list[Value]:
    """Return the values that a function returned for `count` samples, one per sample. `shape`: the
    framework in whose way it was called. Raises `WrongReturn` if that allows no such result."""
    match shape:
        case "verl":
            if isinstance(returned, Mapping):
                if "score" not in returned:
                    raise WrongReturn(f"returned a dict without score: {_names(returned)}")
                returned = returned["score"]
            return [_number(returned)]
        case "areal":
            return [_number(returned)]
        case "openrlhf" if isinstance(returned, Mapping):
            if "rewards" not in returned:
                raise WrongReturn(f"returned a dict without rewards: {_names(returned)}")
            returned = returned["rewards"]
    return _listed(returned, count)


def _names(returned: Mapping[Any, Any]) -> str:
    return shortened(", ".join(map(str, returned))) or "empty"


def _listed(returned: Any, count: int) -> list[Value]:
    try:
        if isinstance(returned, str | bytes | Mapping):
            raise TypeError
        length = len(returned)
    except TypeError:
        kind = type(returned).__name__
        raise WrongReturn(f"returned {kind}, not a list with one number per completion") from None
    if length != count:
        raise WrongReturn(f"returned {length} values for {count} completions")
    return [_number(value) for value in returned]


def _number(value: Any) -> Value:
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if abs(number) <= MAX_REWARD:
        return number
    what = f"larger than {MAX_REWARD:g}" if math.isfinite(number) else "not a number"
    return {
        "why": f"returned {_shown(value)}, {what}",
        "kind": f"returned a {type(value).__name__} that is {what}",
    }


def _shown(value: Any) -> str:
    try:
        return shortened(repr(value))
    except Exception:  # a repr of the user's own, or an integer too long to print
        return f"a {type(value).__name__}"


def error_of(error: BaseException) -> dict[str, str]:
    """The name of the error's class, its message, and a traceback of the user's own code, as
    "error", "said" and "where"."""
    try:
        said = shortened(str(error))
    except Exception:  # a __str__ of the user's own
        said = "(its message cannot be shown)"
    return {"error": type(error).__name__, "said": said, "where": _users_lines(error)}


def _users_lines(error: BaseException) -> str:
    """The error's message and the lines of user code that raised it, the innermost last."""
    while isinstance(error.__cause__, BaseException):
        error = error.__cause__
    try:
        said = "".join(traceback.format_exception_only(error)).strip()
    except Exception:
        said = type(error).__name__
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not Path(frame.filename).is_relative_to(_PACKAGE)
    ]
    lines = "".join(traceback.format_list(frames[-8:])).rstrip()
    return _without_controls(f" ({said[:_MAX_LINES]})\n{lines[-_MAX_LINES:]}")


def _without_controls(text: str) -> str:
    """The text, with control characters other than line ends written as escapes, since a terminal
    would obey them."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def shortened(text: str, most: int = 200) -> str:
    """The text on one line of at most `most` characters, with "..." if it was cut."""
    text = " ".join(text[: 10 * most].split())
    return text if len(text) <= most else text[: most - 3] + "..."
