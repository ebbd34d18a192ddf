"""Turns a tokenizer's tokens into text, and finds the token that ends an assistant's message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

_REPLY = "reply"


class Detokenizer:
    """Turns tokens into text as a tokenizer's `decode` does, but faster: if tokens stand for bytes,
    each token's bytes are looked up once and joined. Tokens that are added later are known, too."""

    def __init__(self, tokenizer: Any, *, is_raw: bool = False) -> None:
        """`is_raw`: whether to leave out the clean-up of spaces and other changes that the
        tokenizer's `decode` may make."""
        self._tokenizer = tokenizer
        self._backend: Any = None
        if is_raw or _decodes_plainly(tokenizer):
            self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._is_raw = is_raw
        self._all: TokenBytes | None = None
        self._plain: TokenBytes | None = None
        if self._backend is not None and _is_byte_level(self._backend):
            self._all = TokenBytes(self._backend)
            self._plain = TokenBytes(self._backend, skips_special=True)

    def __call__(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Returns the text of these tokens; `skip_special_tokens` leaves out special tokens."""
        known = self._plain if skip_special_tokens else self._all
        if known is not None:
            return b"".join(map(known.__getitem__, tokens)).decode(errors="replace")
        if self._backend is not None:  # what `decode` does, without its look at each token
            return str(self._backend.decode(list(tokens), skip_special_tokens=skip_special_tokens))
        how = {"clean_up_tokenization_spaces": False} if self._is_raw else {}
        return str(
            self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens, **how)
        )


class TokenBytes(dict[int, bytes]):
    """A dict of the bytes of each token, filled at the first use of a token, as the decoder
    `ByteLevel` of the library tokenizers computes them."""

    def __init__(self, backend: Any, *, skips_special: bool = False) -> None:
        """`skips_special`: whether special tokens have no bytes."""
        super().__init__()
        self._backend, self._skips_special = backend, skips_special

    def __missing__(self, token: int) -> bytes:
        written = self._backend.id_to_token(token)
        if written is None:
            return b""  # nobody's, so far
        found = self[token] = b"" if self._is_skipped(written) else _bytes_of(written)
        return found

    def _is_skipped(self, written: str) -> bool:
        if not self._skips_special:
            return False
        added = self._backend.get_added_tokens_decoder().values()  # some may be new
        return any(one.special and one.content == written for one in added)


def _bytes_of(written: str) -> bytes:
    """Returns the bytes of a token. For one with a letter that stands for no byte, such as an added
    token, these are the UTF-8 bytes of its text."""
    letters = byte_letters()
    try:
        return bytes([letters[letter] for letter in written])
    except KeyError:
        return written.encode()


@cache
def byte_letters() -> dict[str, int]:
    """Returns the byte for each letter with which GPT-2's vocabulary writes bytes: printable
    Latin-1 bytes are their own letters, the others, in order, the letters from U+0100 on."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)).difference(seen))
    letters = {chr(byte): byte for byte in seen}
    letters.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return letters


def _is_byte_level(backend: Any) -> bool:
    kind = type(backend.decoder)
    return (kind.__module__, kind.__name__) == ("tokenizers.decoders", "ByteLevel")


def _decodes_plainly(tokenizer: Any) -> bool:
    """Whether the tokenizer uses transformers' own `decode`, without a clean-up of spaces."""
    methods = (getattr(type(tokenizer), name, None) for name in ("decode", "_decode"))
    return not getattr(tokenizer, "clean_up_tokenization_spaces", True) and all(
        getattr(one, "__module__", "").startswith("transformers.tokenization_utils")
        for one in methods
    )


def end_of_turn(
    tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None
) -> int | None:
    """Returns the token that the chat template puts after an assistant's message. None if there is
    no such token or no template, or the template fails on a plain exchange."""
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


class SpecialTokens:
    """The texts that a tokenizer turns into special tokens. In an untrusted text they could end a
    turn, or begin one of another role."""

    def __init__(self, tokenizer: Any) -> None:
        added = tokenizer.added_tokens_decoder.values()
        marks = {one.content for one in added if one.special or one.content.startswith("<")}
        self._texts = [text for text in {*marks, *tokenizer.all_special_tokens} if len(text) > 1]

    def spelt_out(self, text: str) -> str:
        """Returns the text with a space inside each special token's text, so that it becomes plain
        text."""
        for one in self._texts:
            if one in text:
                text = text.replace(one, f"{one[0]} {one[1:]}")
        return text
