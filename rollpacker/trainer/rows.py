"""Samples as rows, the token sequences that go through the models.

A sample is one row, unless its chat template rewrote earlier turns of the dialogue: then there is a
row for each prompt that the model saw. A row has per-token numbers, such as log-probs, of its own
tokens only; its token weight is the sample's."""

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
"""Fields of a `TrainSample` that may be a tuple with one number for each token that was sampled.
They are cut up where a sample becomes several rows."""


def rows_of(sample: Sample) -> list[Sample]:
    """Return the rows of a sample, each as a sample of its own. There are several only if a chat
    template rewrote earlier turns of the dialogue; else the sample itself is the only one."""
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
    """Join the scores of rows into scores of samples. `counts` has the number of rows of each
    sample, in order. Empty if `scores` is empty, as in all pipeline stages but the last."""
    if not scores:
        return []
    answers, start = [], 0
    for count in counts:
        rows, start = scores[start : start + count], start + count
        answers.append(rows[0] if count == 1 else _joined(rows))
    return answers


def length_of(sample: ScoreRequest) -> int:
    """Return the number of tokens that a sample has in training, prompt included. If a chat
    template rewrote earlier turns, the sample is trained as several rows, which all count."""
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
