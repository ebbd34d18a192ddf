"""How what is told is compared with what was told before.

Decisions do not depend on the processor, so logs of commands are compared byte for byte. What is
told of them (summaries, metrics, simulated results) is compared by this rule: numbers to 12 digits,
everything else exactly. It would be the same on all processors too, but for averages that a report
leaves to numpy or to the C library.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

DIGITS = 1e-12
"""Largest relative difference of two numbers that count as equal."""
DIFFERENCES = ("shift", "gain", "error", "correlation")
"""Words in the names of numbers that are differences of nearly equal ones, or shares that may be
nearly 0: these may also differ by `DIGITS` itself, as the numbers that they are made of have about
the size 1."""


def differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """What differs, a line each. `where`: the place in the two, which are made of dicts, lists,
    numbers and text."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted(one.keys() | other.keys(), key=str):
            yield from differences(one.get(key), other.get(key), f"{where}/{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for place, (first, second) in enumerate(zip(one, other, strict=True)):
            yield from differences(first, second, f"{where}/{place}")
    elif not _equal(one, other, where):
        yield f"{where}: {one} is now {other}"


def _equal(one: Any, other: Any, where: str) -> bool:
    if type(one) is not float or type(other) is not float:
        return type(one) is type(other) and bool(one == other)
    floor = DIGITS if any(word in where for word in DIFFERENCES) else 0.0
    both_nan = math.isnan(one) and math.isnan(other)
    return both_nan or math.isclose(one, other, rel_tol=DIGITS, abs_tol=floor)
