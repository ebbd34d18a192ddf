"""What a chat template writes around the words of messages, found once and used again.

Most templates copy what a user or a tool said. The text around it is then the same for all messages
of one shape: their keys and all values but `content`. Rendering took as long as encoding.

It is left to the template wherever that may look into the words: those that hold a string which is
written in the template, or are part of one (`'</think>' in content`), begin or end with white space
(`content | trim`), or are none. A shape whose words come out otherwise than they went in (`tojson`)
has no pattern. That leaves templates that count letters: so some texts are rendered all the same.
"""

from __future__ import annotations

import ast
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from rollpacker.dialogue.trajectory import Message

Shape = tuple[object, ...]

MAX_SHAPES = 1024
"""Then all are forgotten."""
CHECK_FIRST, CHECK_EACH = 16, 256
"""So many uses of a pattern are compared with what the template says, and each so-many-th."""

_PROBES = ("words", f"a{string.printable.strip()}\n\n  \t\u00e9\u4f60\U0001f642 b")
"""Words that must come out as they are; with a number around them, so that they differ."""


@dataclass(slots=True)
class _Pattern:
    pieces: list[str] | None
    """Around the words. None: the template has to be asked."""
    num_used: int = 0


class Patterns:
    """Called with messages, returns what `render` would."""

    def __init__(
        self, render: Callable[[Sequence[Message]], str], template: str | Mapping[str, str]
    ) -> None:
        """`template`: its source, or several by name. Raises what `render` raises, when called."""
        self._render = render
        sources = [template] if isinstance(template, str) else template.values()
        written = [one for source in sources for one in _written(source)]
        self._all_written = "\0".join(written)
        self._is_written = re.compile("|".join(map(re.escape, written)) or r"(?!)")
        self._patterns: dict[Shape, _Pattern] = {}

    def __call__(self, messages: Sequence[Message]) -> str:
        shape: list[object] = []
        words: list[str] = []
        for message in messages:
            shape.append(len(message))
            for key, value in message.items():
                if type(value) is not str:
                    return self._render(messages)
                shape.append(key)
                if key != "content":
                    shape.append(value)
                elif self._is_copied(value):
                    words.append(value)
                else:
                    return self._render(messages)
        pattern = self._pattern(tuple(shape), messages)
        if pattern.pieces is None or len(words) != len(messages):
            return self._render(messages)
        pattern.num_used += 1
        text = _filled(pattern.pieces, words)
        if pattern.num_used <= CHECK_FIRST or pattern.num_used % CHECK_EACH == 0:
            rendered = self._render(messages)
            if text != rendered:
                pattern.pieces = None
            return rendered
        return text

    def _is_copied(self, words: str) -> bool:
        """No template can treat them otherwise than other words by what it is written with."""
        return (
            words not in self._all_written
            and not (words[0].isspace() or words[-1].isspace())
            and self._is_written.search(words) is None
        )

    def _pattern(self, shape: Shape, messages: Sequence[Message]) -> _Pattern:
        pattern = self._patterns.get(shape)
        if pattern is None:
            if len(self._patterns) >= MAX_SHAPES:
                self._patterns.clear()
            pattern = self._patterns[shape] = _Pattern(self._found(messages))
        return pattern

    def _found(self, messages: Sequence[Message]) -> list[str] | None:
        pieces = None
        for probe in _PROBES:
            words = [f"{number}{probe}{number}" for number in range(len(messages))]
            said = zip(messages, words, strict=True)
            try:
                text = self._render([{**message, "content": word} for message, word in said])
            except ValueError:
                return None
            if pieces is None:
                pieces = []
                for word in words:
                    piece, _, text = text.partition(word)
                    pieces.append(piece)
                pieces.append(text)
            elif _filled(pieces, words) != text:
                return None
        return pieces


def _filled(pieces: Sequence[str], words: Sequence[str]) -> str:
    return "".join([*chain(*zip(pieces, words, strict=False)), pieces[-1]])


def _written(template: str) -> list[str]:
    """The strings of a template's own, but for white space, which the probe has, too."""
    import jinja2

    tokens = jinja2.Environment().lex(template)
    found = {str(ast.literal_eval(value)) for _, kind, value in tokens if kind == "string"}
    return sorted(one for one in found if one.strip())
