"""Encodes rendered text to tokens in such a way that texts from tools and users cannot
act as special tokens. A tool's result may contain `<|im_end|>`, which would end the
turn if it were encoded with the rest; so it is encoded as ordinary characters. All
other text is encoded as usual."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from rollpacker.chat_template import Detokenizer
from rollpacker.dialogue.token_length import TokenLength, token_length
from rollpacker.dialogue.trajectory import TooLong

Held = Mapping[str, str]
"""For each placeholder in a rendered text, the marker that it stands for: a text such as
`<|im_end|>`, written by a tool or user, that would be encoded as a special token."""

_SPACE = "\u2581"

OWN_WORDS = ("system", "developer", "assistant")
"""Roles whose messages keep their markers (texts of special tokens, such as
`<|im_end|>`), since the model or the run's author wrote these messages. In others'
messages markers become plain text."""


class Encoder:
    """Encodes rendered text to tokens, and decodes tokens to text."""

    def __init__(self, tokenizer: Any, template_texts: Iterable[str]) -> None:
        """Find the markers: the texts of special tokens, and those of added tokens that occur
        in `template_texts` (what the chat template writes). Texts from tools and users never
        become tokens of markers."""
        self._tokenizer = tokenizer
        self._text = Detokenizer(tokenizer, is_raw=True)
        self._texts: dict[int, str] = {}
        """Cache of the text of each token id that was asked for. There are few:
        the tokens that end turns."""
        written = "\n".join(template_texts)
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._ids = {
            token.content: number
            for number, token in added.items()
            if (token.special or token.content in written) and token.content.strip()
        }
        self.markers = _any_of(self._ids)
        """Pattern that matches a marker (text of a special token, such as
        `<|im_end|>`) anywhere in a text."""
        self._spaced = _any_of(
            self._ids,
            before={token.content for token in added.values() if token.lstrip},
            behind={token.content for token in added.values() if token.rstrip},
        )

        # Some tokenizers put a space before the first word of what they are given, wherever it is.
        mark = next(iter(self._ids), "")
        self._adds_space = False
        self._adds_space = self._bare_ids("a") != self._whole_ids(mark + "a")[bool(mark) :]

    @property
    def marker_ids(self) -> frozenset[int]:
        """Ids of the special tokens, such as the end of a turn. Words of tools and users never
        become these."""
        return frozenset(self._ids.values())

    def check_room(self, text: str, held: Held, most: int | None) -> None:
        """Raise `TooLong` if the text surely has more than `most` tokens (None: no limit). `held`
        has the markers that placeholders in the text stand for. A text passes if its number of
        tokens cannot be bounded without encoding it."""
        if most is None or len(text) <= most or self._token_length is None:
            return
        if held:  # a stand-in may be longer than what it stands for
            stand_ins = re.compile("|".join(map(re.escape, held)))
            text = stand_ins.sub(lambda found: held[found.group()], text)
        if self._token_length.fewest(text) > most:
            raise TooLong

    @cached_property
    def _token_length(self) -> TokenLength | None:
        return token_length(self._tokenizer)

    def encode(self, text: str, held: Held | None = None, behind: int | None = None) -> list[int]:
        """Return the tokens of `text`. The texts in `held`, whose placeholders are in `text`, are
        encoded as ordinary characters. `behind` is the token before the text, for tokenizers that
        treat the beginning of a text differently; None: there is none."""
        anchor = "" if behind is None else self.text_of(behind)
        if not held:
            ids = self._whole_ids(anchor + text)
        else:
            stand_ins = re.compile("|".join(map(re.escape, held)))
            ids = []
            for part in self._parts(anchor + text, stand_ins):
                if stand_ins.search(part):
                    ids += self._letters(part, held, stand_ins)
                elif part:
                    ids += self._whole_ids(part)
        if behind is None:
            return ids
        if ids[:1] == [behind]:
            return ids[1:]
        return self.encode(text, held)

    def text_of(self, token: int) -> str:
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self.decode([token])
        return text

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of these tokens, special tokens included."""
        return self._text(tokens, skip_special_tokens=False)

    def _whole_ids(self, text: str) -> list[int]:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is not None and not (
            backend.truncation or backend.padding or backend.encode_special_tokens
        ):  # what the call does, in half of its time
            return list(backend.encode(text, add_special_tokens=False).ids)
        return list(
            self._tokenizer(
                text, add_special_tokens=False, return_attention_mask=False, verbose=False
            )["input_ids"]
        )

    def _parts(self, text: str, stand_ins: re.Pattern[str]) -> Iterable[str]:
        """Yield the parts of a text that are to be encoded separately. A part in which
        `stand_ins` finds a placeholder reaches from the last marker (text of a special token)
        before it to the next one behind."""
        begun = at = 0
        for found in [*self._spaced.finditer(text), None]:
            end = len(text) if found is None else found.start()
            if stand_ins.search(text, at, end):
                yield text[begun:at]
                yield text[at:end]
                begun = end
            at = end if found is None else found.end()
        yield text[begun:]

    def _letters(self, part: str, held: Held, stand_ins: re.Pattern[str]) -> list[int]:
        """Return the tokens of a text with placeholders, whose markers (in `held`) are encoded with
        the ordinary vocabulary alone. If that still gives a special token, each marker gets a space
        after its first character."""
        ids = self._bare_ids(stand_ins.sub(lambda found: held[found.group()], part))
        if self.marker_ids.isdisjoint(ids):
            return ids
        spaced = {name: f"{text[:1]} {text[1:]}" for name, text in held.items()}
        return self._bare_ids(stand_ins.sub(lambda found: spaced[found.group()], part))

    def _bare_ids(self, text: str) -> list[int]:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return list(
                self._tokenizer(
                    text, add_special_tokens=False, split_special_tokens=True, verbose=False
                )["input_ids"]
            )
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        words = [text]
        if backend.pre_tokenizer is not None:
            words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        if self._adds_space and words and not text.startswith((" ", _SPACE)):
            words[0] = words[0].removeprefix(_SPACE)
        return [token.id for word in words for token in backend.model.tokenize(word)]


def held(
    messages: Iterable[Mapping[str, Any]], markers: re.Pattern[str]
) -> tuple[list[dict[str, Any]], Held]:
    """Replace all markers (texts of special tokens, such as `<|im_end|>`) in words of tools and
    users by placeholders. Returns the changed messages, and for each placeholder the marker that it
    stands for. Lone surrogates, which have no tokens, become U+FFFD."""
    plain = [_whole(dict(message)) for message in messages]
    name = ""
    words: dict[str, str] = {}

    def stand_in(found: re.Match[str]) -> str:
        nonlocal name
        name = name or _in_none_of(plain)
        return words.setdefault(found.group(), f"{name}{len(words)}z")

    changed = [
        message
        if message.get("role") in OWN_WORDS
        else {
            key: value if key == "role" else _mapped(value, markers, stand_in)
            for key, value in message.items()
        }
        for message in plain
    ]
    return changed, {found: text for text, found in words.items()}


def whole_marker(text: str, length: int, markers: re.Pattern[str]) -> int:
    """Return the largest length, up to `length`, at which a cut of the text splits no marker (text
    of a special token)."""
    for found in markers.finditer(text):
        if found.start() < length < found.end():
            return found.start()
    return length


def num_alike(one: str, other: str) -> int:
    """Return the number of characters in which the beginnings of two texts agree."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _any_of(
    texts: Iterable[str], before: Iterable[str] = (), behind: Iterable[str] = ()
) -> re.Pattern[str]:
    """Return a pattern that matches any of `texts`, longer ones first. It takes in the white space
    before those of them that are in `before`, and after those that are in `behind`."""
    patterns = [
        (r"\s*" if text in before else "") + re.escape(text) + (r"\s*" if text in behind else "")
        for text in sorted(texts, key=len, reverse=True)
    ]
    return re.compile("|".join(patterns) or r"(?!)")


def _mapped(value: Any, pattern: re.Pattern[str], to: Any) -> Any:
    if isinstance(value, str):
        return pattern.sub(to, value)
    if isinstance(value, Mapping):
        return {key: _mapped(inner, pattern, to) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(inner, pattern, to) for inner in value]
    return value


def _in_none_of(messages: Sequence[Mapping[str, Any]]) -> str:
    name = "heldtext"
    while any(name in str(message) for message in messages):
        name += "x"
    return name


_HALF = re.compile("[\ud800-\udfff]")


def _whole(message: dict[str, Any]) -> dict[str, Any]:
    changed: dict[str, Any] = _mapped(message, _HALF, "\ufffd")
    return changed
