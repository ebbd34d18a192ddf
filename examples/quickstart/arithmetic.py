"""What the quickstart asks and how it judges: sums such as `4-1+7=`, one character a token.

A response works the sum out one step at a time, `4-1=3+7=10`, and may go on with any number of
"!" before it ends. Its answer is what stands behind the last "=".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def prompt(row: Mapping[str, Any]) -> str:
    """The sum itself instead of reasoning-gym's sentence around it."""
    expression: str = row["metadata"]["expression"]
    return expression.replace(" ", "") + "="


def correct(
    completions: Sequence[str],
    answer: Sequence[str],
    finish_reasons: Sequence[str],
    **columns: Any,
) -> list[float | None]:
    """1.0 for a response that ended by itself with the right number, else 0.0.

    reasoning-gym's own scorer gives part of the reward where the right number is a part of the
    answer ("-14" for "4"), which a policy learns to exploit.
    """
    return [
        float(reason == "stop" and final_answer(completion) == expected)
        for completion, expected, reason in zip(completions, answer, finish_reasons, strict=True)
    ]


def final_answer(completion: str) -> str:
    """The number that the response ends on; empty if there is none."""
    return completion.rpartition("=")[2].rstrip("!")
