"""What a tokenizer's chat template puts behind an assistant's message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_REPLY = "reply"


def decoded(tokenizer: Any, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
    """The text of these tokens, as the tokenizer's `decode` has it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    cleans_up = getattr(tokenizer, "clean_up_tokenization_spaces", True)
    if backend is not None and not cleans_up and _decodes_plainly(type(tokenizer)):
        # What `decode` does, without its look at each token.
        return str(backend.decode(list(tokens), skip_special_tokens=skip_special_tokens))
    return str(tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))


def _decodes_plainly(kind: type) -> bool:
    """Whether decoding is transformers' own, which some tokenizers do more to."""
    methods = (getattr(kind, name, None) for name in ("decode", "_decode"))
    return all(
        getattr(one, "__module__", "").startswith("transformers.tokenization_utils")
        for one in methods
    )


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
