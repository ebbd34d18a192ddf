"""Stretches of a response's tokens that the model was given rather than sampled; and the rows in
which a response is trained on, where its earlier part was written anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

Spans = tuple[tuple[int, int], ...]
"""First place, and the place behind the last, of each stretch, in rising order, none touching
another or empty."""

Rewritten = tuple[tuple[int, tuple[int, ...]], ...]
"""Places in a response's tokens, rising, each with the tokens that the model saw from there on in
place of all that came before; the tokens sampled after the place are trained on after those."""


def check_spans(spans: Spans, count: int) -> None:
    """Raises `ValueError` unless these are stretches of a sequence of `count` places."""
    end = -1
    for first, behind in spans:
        if not end < first < behind <= count:
            raise ValueError(f"{list(spans)} are no stretches of {count}")
        end = behind


def num_outside(count: int, spans: Spans) -> int:
    """Number of places of a sequence of `count` that lie in none of the stretches."""
    return count - sum(behind - first for first, behind in spans)


def outside(values: Sequence[T], spans: Spans) -> Sequence[T]:
    """The values at the places that lie in none of the stretches."""
    if not spans:
        return values
    kept: list[T] = []
    start = 0
    for first, behind in spans:
        kept += values[start:first]
        start = behind
    return (*kept, *values[start:])


def within(spans: Spans, first: int, behind: int) -> Spans:
    """The parts of these stretches between two places, with places counted from `first`."""
    cut = ((max(start, first), min(end, behind)) for start, end in spans)
    return tuple((start - first, end - first) for start, end in cut if start < end)


def rows_in(
    prompt: tuple[int, ...], count: int, given: Spans, rewritten: Rewritten
) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """The rows of a response of `count` tokens, each as the tokens before it, its first place and
    the place behind its last. Given tokens at a row's end are left out, and so is a row without a
    sampled token."""
    starts = [(0, prompt), *rewritten]
    ends = [first for first, _ in rewritten]
    gaps = {behind: first for first, behind in given}
    for (first, context), end in zip(starts, [*ends, count], strict=True):
        behind = max(gaps.get(end, end), first)
        if num_outside(behind - first, within(given, first, behind)):
            yield context, first, behind


def num_in_rows(prompt: tuple[int, ...], count: int, given: Spans, rewritten: Rewritten) -> int:
    """Number of tokens of all rows of a response, with the tokens that stand before each row."""
    if not rewritten:
        return len(prompt) + count
    rows = rows_in(prompt, count, given, rewritten)
    return sum(len(context) + behind - first for context, first, behind in rows)
