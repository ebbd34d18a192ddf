"""Ranges of a response's tokens that the model was given, not sampled; and the rows in which a
response is trained on if its chat template changes earlier turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

Spans = tuple[tuple[int, int], ...]
"""Ranges of tokens in rising order, each as (first, one after the last). None is empty, and at
least one token lies between two."""

Rewritten = tuple[tuple[int, tuple[int, ...]], ...]
"""Pairs (place in a response's tokens, context), in rising order: from that place on, the model
went on from this context instead of all tokens before, in generation as in training."""


def check_spans(spans: Spans, count: int) -> None:
    """Raise `ValueError` unless these are valid ranges of a sequence of `count` tokens."""
    end = -1
    for first, behind in spans:
        if not end < first < behind <= count:
            raise ValueError(f"{list(spans)} are no stretches of {count}")
        end = behind


def num_outside(count: int, spans: Spans) -> int:
    """Returns how many of `count` tokens lie in none of these ranges."""
    return count - sum(behind - first for first, behind in spans)


def outside(values: Sequence[T], spans: Spans) -> Sequence[T]:
    """Returns the values, one per token, of the tokens that lie in none of these ranges."""
    if not spans:
        return values
    kept: list[T] = []
    start = 0
    for first, behind in spans:
        kept += values[start:first]
        start = behind
    return (*kept, *values[start:])


def within(spans: Spans, first: int, behind: int) -> Spans:
    """Returns the parts of these ranges from token `first` to before `behind`, with `first` as
    0."""
    cut = ((max(start, first), min(end, behind)) for start, end in spans)
    return tuple((start - first, end - first) for start, end in cut if start < end)


def rows_in(
    prompt: tuple[int, ...], count: int, given: Spans, rewritten: Rewritten
) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Yields a response's training rows: parts with a context of their own, since the chat template
    changed earlier turns (`rewritten`). Each is (context, first token, one after the last). Tokens
    `given` (not sampled) at a row's end, and rows without a sampled token, are left out."""
    starts = [(0, prompt), *rewritten]
    ends = [first for first, _ in rewritten]
    gaps = {behind: first for first, behind in given}
    for (first, context), end in zip(starts, [*ends, count], strict=True):
        behind = max(gaps.get(end, end), first)
        if num_outside(behind - first, within(given, first, behind)):
            yield context, first, behind


def num_in_rows(prompt: tuple[int, ...], count: int, given: Spans, rewritten: Rewritten) -> int:
    """Returns the number of tokens in all training rows of a response of `count` tokens, contexts
    included. It has several rows if the chat template changed earlier turns (see `rows_in`)."""
    if not rewritten:
        return len(prompt) + count
    rows = rows_in(prompt, count, given, rewritten)
    return sum(len(context) + behind - first for context, first, behind in rows)
