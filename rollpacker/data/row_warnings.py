"""Warnings about rows whose prompts may differ from what their author expects."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from rollpacker.data.chat import visible
from rollpacker.data.rendering import Messages

Located = tuple[str, Messages]
"""The place of a row (such as file and line), and its messages for the chat template."""


def row_warnings(rows: Sequence[Located], tokenizer: Any, system_prompt: str | None) -> list[str]:
    """Return a line of warning for each problem that some rows have: their own system message in
    place of `system_prompt` (the config's, or None), a conversation that ends with the assistant, a
    text with a special token of the tokenizer."""

    def own_system(messages: Messages) -> bool:
        first = messages[0]
        return first["role"] == "system" and first["content"] != system_prompt

    special = _special_tokens(tokenizer)

    def special_in(messages: Messages) -> str | None:
        texts = (one["content"] for one in messages)
        found = (special.search(text) for text in texts if text != system_prompt)
        return next((one[0] for one in found if one), None)

    last_is_answer = "end with a message of the assistant, which the chat template closes: the"
    lines = [
        None
        if system_prompt is None
        else _line(rows, own_system, "do not use system_prompt, they have a system message"),
        _line(
            rows,
            lambda messages: messages[-1]["role"] == "assistant",
            f"{last_is_answer} response is a turn after it, not its continuation",
        ),
    ]
    token = next((found for _, messages in rows if (found := special_in(messages))), None)
    if token is not None:
        lines.append(
            _line(
                rows,
                lambda messages: special_in(messages) is not None,
                f"hold a special token of the tokenizer ({visible(token)}) as text; it acts as that"
                " token, so it can end a turn or begin one of another role",
            )
        )
    return [line for line in lines if line is not None]


def _line(rows: Sequence[Located], fits: Callable[[Messages], bool], what: str) -> str | None:
    """Return a line with the number of rows whose messages `fits` accepts, the place of the first
    of them, and `what`, which says in words what such rows do. None: there are no such rows."""
    places = [where for where, messages in rows if fits(messages)]
    if not places:
        return None
    return f"{len(places)} of {len(rows)} chat prompts {what}; the first: {places[0]}"


def _special_tokens(tokenizer: Any) -> re.Pattern[str]:
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    names = {token.content for token in added if token.special} | {*tokenizer.all_special_tokens}
    longest_first = sorted((name for name in names if name), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
