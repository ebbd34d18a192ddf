"""What a tokenizer's chat template puts behind an assistant's message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_REPLY = "reply"


def end_of_turn(
    tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None
) -> int | None:
    """The token that the template puts behind an assistant's message. None: it puts none there, or
    refuses a plain exchange, or there is no template."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    exchange = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _REPLY}]
    try:
        text = tokenizer.apply_chat_template(
            exchange, tokenize=False, **(chat_template_kwargs or {})
        )
    except Exception:  # whatever a template's author wrote
        return None
    _, found, rest = str(text).rpartition(_REPLY)
    rest = rest.strip()
    if not found or not rest:
        return None
    ids = tokenizer(rest, add_special_tokens=False, verbose=False)["input_ids"]
    if not ids or ids[0] == tokenizer.unk_token_id:
        return None
    return int(ids[0])
