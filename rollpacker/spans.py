"""Stretches of a sequence: of a response's tokens, those that the model was given, not drew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

Spans = tuple[tuple[int, int], ...]
"""(first, behind the last) of each stretch, in rising order, apart from each other, none empty."""


def check_spans(spans: Spans, count: int) -> None:
    """Raises `ValueError` if these are no stretches of a sequence of so many."""
    end = -1
    for first, behind in spans:
        if not end < first < behind <= count:
            raise ValueError(f"{list(spans)} are no stretches of {count}")
        end = behind


def num_outside(count: int, spans: Spans) -> int:
    """How many of so many lie in none of the stretches."""
    return count - sum(behind - first for first, behind in spans)


def outside(values: Sequence[T], spans: Spans) -> Sequence[T]:
    """Those that lie in none of the stretches."""
    if not spans:
        return values
    kept: list[T] = []
    start = 0
    for first, behind in spans:
        kept += values[start:first]
        start = behind
    return (*kept, *values[start:])
