"""Checks that numbers in a config lie within bounds. Each check raises `ValueError`, whose text
begins with the number's name.

None and "auto" pass every check: whether a key may have them is a matter of its type. A number that
is not finite fails every check."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any


def check_at_least(owner: object, least: float, *names: str, otherwise: str = "") -> None:
    """Check that the attributes `names` of `owner` are not below `least`. `otherwise`: what the
    message offers in place of a number, such as "auto"."""
    for name, value in _numbers(owner, names):
        if not (math.isfinite(value) and value >= least):
            raise ValueError(f"{name} must be at least {least:g}{_or(otherwise)}, not {value}")


def check_positive(owner: object, *names: str, otherwise: str = "") -> None:
    """Check that the attributes `names` of `owner` are more than 0. `otherwise`: see
    `check_at_least`."""
    for name, value in _numbers(owner, names):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be more than 0{_or(otherwise)}, not {value}")


def check_within(owner: object, interval: str, *names: str) -> None:
    """Check that the attributes `names` of `owner` lie in an interval, written as in mathematics:
    in "[0, 1)" 0 is allowed and 1 is not."""
    low, high = map(float, interval[1:-1].split(","))
    for name, value in _numbers(owner, names):
        above = value >= low if interval[0] == "[" else value > low
        below = value <= high if interval[-1] == "]" else value < high
        if not (above and below):
            raise ValueError(f"{name} must lie in {interval}, not {value}")


def _numbers(owner: object, names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for name in names:
        value = getattr(owner, name)
        if value is not None and value != "auto":
            yield name, value


def _or(otherwise: str) -> str:
    return f", or {otherwise}" if otherwise else ""
