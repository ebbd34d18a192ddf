"""Samples as the rows that go through the models: one row per sample, or of a trajectory whose
template rewrites earlier turns as many rows as there were prompts. A row has the numbers of its own
tokens only, such as log-probs; a token's weight is that of the whole sample."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from rollpacker.spans import num_in_rows, num_outside, rows_in, within
from rollpacker.trainer.trainer import ScoreRequest, TokenScores

Sample = TypeVar("Sample", bound=ScoreRequest)

OF_TOKENS = (
    *("rollout_log_probs", "advantage", "ref_log_probs", "values", "returns"),
    "old_log_probs",
)
"""Fields of a `TrainSample` that may be a tuple with one number for each token that was sampled."""


def rows_of(sample: Sample) -> list[Sample]:
    """Return the rows of tokens that the models run for this sample: the sample itself if it is one
    row, or a sample for each row if a chat template rewrote earlier turns of its dialogue."""
    if not sample.rewritten:
        return [sample]
    tokens, rows, drawn = sample.response_tokens, [], 0
    places = rows_in(sample.prompt_tokens, len(tokens), sample.given, sample.rewritten)
    for context, first, behind in places:
        given = within(sample.given, first, behind)
        part = slice(drawn, drawn := drawn + num_outside(behind - first, given))
        changed: dict[str, Any] = {
            name: value[part]
            for name in OF_TOKENS
            if isinstance(value := getattr(sample, name, None), tuple)
        }
        rows.append(
            replace(
                sample,
                prompt_tokens=context,
                response_tokens=tokens[first:behind],
                given=given,
                rewritten=(),
                **changed,
            )
        )
    return rows


def joined(scores: Sequence[TokenScores], counts: Iterable[int]) -> list[TokenScores]:
    """Join the scores of rows into those of samples that had `counts` rows each. Empty if `scores`
    is empty, as in all but the last pipeline stage."""
    if not scores:
        return []
    answers, start = [], 0
    for count in counts:
        rows, start = scores[start : start + count], start + count
        answers.append(rows[0] if count == 1 else _joined(rows))
    return answers


def length_of(sample: ScoreRequest) -> int:
    """Return the number of tokens of all rows of a sample, with each row's context."""
    count = len(sample.response_tokens)
    return num_in_rows(sample.prompt_tokens, count, sample.given, sample.rewritten)


def _joined(rows: Sequence[TokenScores]) -> TokenScores:
    names = ("log_probs", "ref_log_probs", "teacher_log_probs", "values")
    found = {name: [getattr(row, name) for row in rows] for name in names}
    return TokenScores(
        **{
            name: None if None in parts else tuple(value for part in parts for value in part)
            for name, parts in found.items()
        }
    )
