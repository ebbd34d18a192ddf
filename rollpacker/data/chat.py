"""Decides whether a data set's text prompts go through the tokenizer's chat template, and displays
prompts.

With `chat: auto` they do if the model expects it: the tokenizer has a template, and the model's
responses stop where the template ends an assistant's turn. Base models often have a template too,
but would go on writing after the end of the turn."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollpacker.chat_template import end_of_turn
from rollpacker.data.dataset import DataError, DatasetConfig

MAX_SHOWN = 600
"""Largest number of characters of a prompt that are displayed."""
_WRITTEN = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}


@dataclass(frozen=True, slots=True)
class Chat:
    """How the texts of a data set become prompts."""

    renders: bool
    """Whether each text goes through the chat template as a user's message. Prompts that are chat
    messages always go through it."""
    why: str
    """Reason for `renders` and the config key that changes it, in words for the terminal."""


def chat_of(
    config: DatasetConfig,
    split: str,
    tokenizer: Any,
    end_tokens: Collection[int] = (),
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Chat:
    """Decide for a data set whether texts go through the chat template. `split` ("train" or "eval")
    serves to name the config key. `end_tokens` are tokens at which responses stop, besides the
    tokenizer's own end token. Raises `DataError` for `chat: true` without a template."""
    key = f"data.{split}.chat"
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if config.chat is False:
        return Chat(False, f"texts as they are ({key}=false)")
    if config.system_prompt is not None:
        return Chat(
            True, f"texts as user messages by the chat template (data.{split}.system_prompt)"
        )
    if config.chat is True:
        if not has_template:
            raise DataError(f"{key}=true, but the tokenizer has no chat template; leave it out.")
        return Chat(True, f"texts as user messages by the chat template ({key}=true)")
    if not has_template:
        return Chat(False, "texts as they are (the tokenizer has no chat template)")
    token = end_of_turn(tokenizer, chat_template_kwargs)
    if token is None:
        why = "the chat template ends an assistant's turn with no token of its own"
        return Chat(False, f"texts as they are: {why} ({key}=true renders them all the same)")
    shown = visible(str(tokenizer.convert_ids_to_tokens(token)))
    if token in {*end_tokens, tokenizer.eos_token_id}:
        return Chat(
            True,
            "texts as user messages by the chat template, which ends a turn with"
            f" {shown}, as this model does ({key}=false leaves it out)",
        )
    return Chat(
        False,
        f"texts as they are: the chat template ends a turn with {shown}, where this model does not"
        f" stop, so it looks like a base model ({key}=true renders them all the same)",
    )


def shown_prompt(tokens: Sequence[int], tokenizer: Any) -> str:
    """Return a prompt as one line of text for display, with special tokens shown, invisible
    characters written as escapes, and the middle of a long prompt left out."""
    text = tokenizer.decode(
        list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    if len(text) > MAX_SHOWN:
        head = MAX_SHOWN * 2 // 3
        left_out = len(text) - MAX_SHOWN
        tail = visible(text[len(text) - (MAX_SHOWN - head) :])
        return f"{visible(text[:head])} [... {left_out} characters ...] {tail}"
    return visible(text)


def visible(text: str) -> str:
    """Return the text on one line, with control and invisible characters written as escapes."""
    return "".join(_WRITTEN.get(c) or (_escaped(c) if _hidden(c) else c) for c in text)


def _hidden(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
