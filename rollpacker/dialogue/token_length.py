"""Bounds the number of characters that one token can cover, if a tokenizer's parts allow that.

A text with more characters than this number times the tokens that there is room for is too long. So
its length is judged without encoding it, which for megabytes would block the event loop."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from rollpacker.chat_template import byte_letters

_COMPOSED = 4
"""Largest number of characters that NFC or NFKC composes to one: a letter and three marks."""
_COMPOSES = {"NFC": _COMPOSED, "NFKC": _COMPOSED, "NFD": 1, "NFKD": 1, "Lowercase": 1}
_COMPOSES |= {"Prepend": 1, "ByteLevel": 1}
_KEEPS_ALL = {"ByteLevel", "Digits", "Metaspace"}
_BYTES = {f"<0x{byte:02X}>" for byte in range(256)}


@dataclass(frozen=True, slots=True)
class TokenLength:
    """Bound on the number of characters that one token of a tokenizer covers."""

    longest: int
    """Largest number of characters in the text of one token."""
    composes: int
    """Largest number of characters that the tokenizer composes into one. ASCII is not composed."""

    def fewest(self, text: str) -> int:
        """Return the least number of tokens that the text can have."""
        return -(-len(text) // (self.longest * (1 if text.isascii() else self.composes)))


def token_length(tokenizer: Any) -> TokenLength | None:
    """Return the bound on the characters of one of this tokenizer's tokens. It is known for
    vocabularies of bytes or with a token for each byte (nearly all chat models), or of single
    characters. None: it is not known, for example if a normalizer or a token may swallow white
    space, or one unknown token stands for a whole word."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    added = backend.get_added_tokens_decoder().values()
    normalizer, cut = _parts_of(backend.normalizer), _parts_of(backend.pre_tokenizer)
    if any(one.lstrip or one.rstrip for one in added) or normalizer is None or cut is None:
        return None
    by = [_composes(part) for part in normalizer]
    if None in by or not all(map(_keeps_all, cut)):
        return None
    longest = max((len(one.content) for one in added), default=1)
    if not _is_by_characters(backend, cut):
        if not _has_all_bytes(backend, [*normalizer, *cut]):
            return None
        longest = max(longest, *map(len, backend.get_vocab()))
    return TokenLength(longest, math.prod(one or 1 for one in by))


def _parts_of(whole: Any) -> list[dict[str, Any]] | None:
    """Return the settings of each part of `whole`, a normalizer or pre-tokenizer of the tokenizers
    package; an empty list if `whole` is None. Returns None if the settings cannot be read, since a
    part is written in Python."""
    if whole is None:
        return []
    try:
        found = json.loads(whole.__getstate__())
    except Exception:  # tokenizers' own classes of errors
        return None
    if found["type"] != "Sequence":
        return [found]
    return list(found.get("normalizers") or found.get("pretokenizers") or [])


def _is_by_characters(backend: Any, cut: list[dict[str, Any]]) -> bool:
    """Whether a tokenizer makes every character a token of its own; `cut` are the settings of
    its pre-tokenizer's parts."""
    kinds = [(one["type"], one.get("pattern"), one.get("behavior")) for one in cut]
    alone = [("Split", {"Regex": r"[\s\S]"}, "Isolated")]
    return type(backend.model).__name__ == "WordLevel" and kinds == alone


def _composes(part: dict[str, Any]) -> int | None:
    """Return the most characters that this part of a normalizer composes into one. None: the part
    may drop characters, or is not known."""
    if part["type"] == "Replace":
        return 1 if len(part["pattern"].get("String", "")) == 1 and part["content"] else None
    return _COMPOSES.get(part["type"])


def _keeps_all(cut: dict[str, Any]) -> bool:
    if cut["type"] in ("Split", "Punctuation"):
        return bool(cut["behavior"] != "Removed")
    return cut["type"] in _KEEPS_ALL


def _has_all_bytes(backend: Any, parts: list[dict[str, Any]]) -> bool:
    """Whether the tokenizer has a token for every byte, so that it drops no character and
    no unknown token stands for several characters. `parts` are the settings of its
    normalizer and pre-tokenizer."""
    model = backend.model
    if type(model).__name__ != "BPE" or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    vocabulary = backend.get_vocab(with_added_tokens=False)
    if any(part["type"] == "ByteLevel" for part in parts):
        return all(letter in vocabulary for letter in byte_letters())
    return bool(model.byte_fallback) and all(one in vocabulary for one in _BYTES)
