"""Tests a reward function by a call on made-up completions, before anything is loaded.

A mistake that every response would meet ends the run: an unknown name, a type that does not fit
what the run passes, a column that no row has, a wrong type of result. What the made-up texts may
have caused themselves (a pattern without a match, a missing number) is a warning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollpacker.rewards.reward import RewardInput

TEST_TEXT = "This is a test of the reward."
_NUM_TOKENS = 8
_NO_NUMBER = re.compile("returned a (str|bytes|list|tuple|dict|set) ")
_HINT = "text_of in docs/rewards.md takes both kinds"


@dataclass(frozen=True, slots=True)
class Finding:
    """A mistake in a reward function, in a sentence."""

    text: str
    certain: bool
    """Whether every response would meet the mistake, not just the made-up completions perhaps."""


def made_up(row: RewardInput) -> list[RewardInput]:
    """Return two made-up samples for a dataset row. The completion of one is a fixed text; that of
    the other is the row's answer, or "1" if the row has none."""
    answer = row.columns.get("answer")
    texts = (TEST_TEXT, str(answer) if isinstance(answer, str | int | float) else "1")
    return [
        RewardInput(
            prompt=row.prompt,
            completion=text,
            completion_tokens=tuple(range(1, 1 + _NUM_TOKENS)),
            finish_reason="stop",
            columns=row.columns,
            task=row.task,
            messages=row.messages,
            progress=row.progress,
            episode=row.episode and replace(row.episode, messages=(_said(text),)),
        )
        for text in texts
    ]


def _said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def finding_of(
    replies: Sequence[Mapping[str, Any]], row: RewardInput, all_columns: str | None
) -> Finding | None:
    """Return the mistake that shows in `replies`, which a function's worker gave to calls with
    made-up samples of `row`, or None. `all_columns`: name of the function's `**kwargs` parameter;
    None if it has no such parameter."""
    wrong = next((reply["wrong"] for reply in replies if "wrong" in reply), None)
    if wrong is not None:
        return Finding(f"{wrong}, for test completions.", certain=True)
    if all("error" in reply for reply in replies):
        found = [_raised(reply, row, all_columns) for reply in replies]
        return next((one for one in found if not one.certain), found[0])
    values = [value for reply in replies for value in reply.get("values", ())]
    unusable = [value for value in values if isinstance(value, dict)]
    if unusable and len(unusable) == len(values):
        certain = _NO_NUMBER.match(unusable[0]["kind"]) is not None
        return Finding(f"{unusable[0]['why']}, for a test completion.", certain)
    return None


def _raised(reply: Mapping[str, Any], row: RewardInput, all_columns: str | None) -> Finding:
    kind, said, where = reply["error"], reply["said"], reply["where"]
    if kind == "RewardError":  # a built-in's own words
        return Finding(f"cannot be used: {said}", certain=True)
    shape = f" {shape_of(row)}" if kind in ("TypeError", "AttributeError") else ""
    _, line_break, lines = where.partition("\n")
    text = f"raised {kind} on a test completion: {said}.{shape}{line_break if lines else ''}{lines}"
    return Finding(text, _is_certain(kind, said, where, row, all_columns))


def _is_certain(
    kind: str, said: str, where: str, row: RewardInput, all_columns: str | None
) -> bool:
    match kind:
        case "NameError" | "ImportError" | "ModuleNotFoundError":
            return True
        case "TypeError" | "AttributeError":  # of None: a pattern that did not match
            return "NoneType" not in said
        case "KeyError":
            key = said.strip("'\"")
            taken = rf"\b{re.escape(all_columns or '')}(\[|\.pop\()"
            asked_for = all_columns is not None and re.search(taken, where) is not None
            return asked_for and key not in row.columns
    return False


def shape_of(row: RewardInput) -> str:
    """A sentence, for an error message, on whether a function called in TRL's way gets this row's
    completions as texts, messages or dialogues."""
    if row.episode is not None:
        return (
            "Its completions are dialogues, lists of messages ({'role', 'content'}), because the"
            f" config has an environment ({_HINT})."
        )
    if isinstance(row.prompt, str):
        return (
            "Its completions are texts (str), because the data's prompts are texts; for chat"
            f" messages they would be lists of one message ({_HINT})."
        )
    return (
        "Its completions are lists of one message ({'role', 'content'}), because the data's prompts"
        f" are chat messages; for text prompts they would be texts ({_HINT})."
    )
