"""Stretches of a sequence: of a response's tokens, those that the model was given, not drew; and
the rows in which it is trained on, where what came before was written anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

Spans = tuple[tuple[int, int], ...]
"""(first, behind the last) of each stretch, in rising order, apart from each other, none empty."""

Rewritten = tuple[tuple[int, tuple[int, ...]], ...]
"""Places in a response's tokens, and the tokens that the model saw from there on in place of all
that came before: what was drawn behind them is trained on behind them. In rising order."""


def check_spans(spans: Spans, count: int) -> None:
    """Raises `ValueError` if these are no stretches of a sequence of so many."""
    end = -1
    for first, behind in spans:
        if not end < first < behind <= count:
            raise ValueError(f"{list(spans)} are no stretches of {count}")
        end = behind


def num_outside(count: int, spans: Spans) -> int:
    """Number of places, of so many, that lie in none of the stretches."""
    return count - sum(behind - first for first, behind in spans)


def outside(values: Sequence[T], spans: Spans) -> Sequence[T]:
    """The places that lie in none of the stretches."""
    if not spans:
        return values
    kept: list[T] = []
    start = 0
    for first, behind in spans:
        kept += values[start:first]
        start = behind
    return (*kept, *values[start:])


def within(spans: Spans, first: int, behind: int) -> Spans:
    """The parts of these stretches that lie between two places, counted from the first."""
    cut = ((max(start, first), min(end, behind)) for start, end in spans)
    return tuple((start - first, end - first) for start, end in cut if start < end)


def rows_in(
    prompt: tuple[int, ...], count: int, given: Spans, rewritten: Rewritten
) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """The rows of a response of so many tokens: what stands before each, its first token and the
    one behind its last. What was given at a row's end is left out, and so is a row of which nothing
    was drawn."""
    starts = [(0, prompt), *rewritten]
    ends = [first for first, _ in rewritten]
    gaps = {behind: first for first, behind in given}
    for (first, context), end in zip(starts, [*ends, count], strict=True):
        behind = max(gaps.get(end, end), first)
        if num_outside(behind - first, within(given, first, behind)):
            yield context, first, behind


def num_in_rows(prompt: tuple[int, ...], count: int, given: Spans, rewritten: Rewritten) -> int:
    """Tokens of all rows, with what stands before each."""
    if not rewritten:
        return len(prompt) + count
    rows = rows_in(prompt, count, given, rewritten)
    return sum(len(context) + behind - first for context, first, behind in rows)
