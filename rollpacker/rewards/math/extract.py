r"""Finds the final answer in a response and checks its size, by scanning text in linear time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

METHODS = ("boxed", "hashes", "answer_is", "last_line")

_BOX_OR_BRACE = re.compile(r"\\(?:boxed|fbox)\s{0,8}\{|\\.|[{}]", re.DOTALL)
_BETWEEN = re.compile(
    r"(?:\\[()\[\]]|\\q?quad|\\[,;: ]|\\text\s{0,4}\{\s{0,4}(?:and|or)\s{0,4}\}|\$|[\s,;.*]"
    r"|\b(?:and|or)\b|[A-Za-z]\s{0,4}=)*"
)
_NEAR = 40
r"""Most characters between two boxes that can form one answer, as in `\boxed{1}` or `\boxed{2}`."""
_ANSWER_IS = re.compile(r"answer\s{0,4}(?:is|:|=)\s{0,4}:?", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """Largest sizes that the answer in a response may have. An answer beyond one of them counts as
    wrong without being parsed."""

    chars: int
    nesting: int
    digits: int
    """Most digits of one number."""
    exponent: int
    """Largest whole number in an exponent, a factorial or a binomial coefficient."""
    elements: int
    """Most elements of a list, set or matrix."""
    boxes: int
    """Most different boxed answers in a response."""

    def problem(self, answer: str) -> str | None:
        """The first limit that the answer exceeds, in words. None: it exceeds none."""
        if len(answer) > self.chars:
            return f"longer than {self.chars} characters"
        if any((ord(c) < 32 and c not in "\t\n\r") or "\ud800" <= c <= "\udfff" for c in answer):
            return "control characters"
        if found := _MACRO.search(answer):
            return f"the command {found[0]}"
        if _deepest(answer) > self.nesting:
            return f"nested more than {self.nesting} deep"
        if any(len(run[0]) > self.digits for run in _DIGIT_RUN.finditer(answer)):
            return f"a number of more than {self.digits} digits"
        if len(_SEPARATOR.findall(answer)) >= self.elements:
            return f"more than {self.elements} elements"
        return self._too_large(answer)

    def _too_large(self, answer: str) -> str | None:
        size = len(str(self.exponent))
        for exponent in _exponents(answer):
            runs = _WHOLE.findall(exponent)
            if any(len(run) > size or int(run) > self.exponent for run in runs):
                return f"an exponent above {self.exponent}"
            if "!" in exponent or _NUMERIC_POWER.search(exponent):
                return "an exponent that is a power or a factorial"
        for found in _FACTORIAL.finditer(answer):
            if len(found[1]) > size or int(found[1]) > self.exponent:
                return f"the factorial of a number above {self.exponent}"
        if _NESTED_FACTORIAL.search(answer):
            return "the factorial of a factorial, power or expression"
        for found in _BINOMIAL.finditer(answer):
            if any(len(n) > size or int(n) > self.exponent for n in found.groups()):
                return f"a binomial coefficient of a number above {self.exponent}"
        return None


_MACRO = re.compile(
    r"\\(?:def|edef|gdef|xdef|let|newcommand|renewcommand|input|include|write|read|open(?:in|out)"
    r"|catcode|csname|expandafter|loop|immediate|special|usepackage|verb|url|href)(?![A-Za-z])"
)
_WHOLE = re.compile(r"(?<![\d.])\d+")
_POWERS = re.compile(r"(?:(?:\^|\*\*)\s*[-+]?\w*\s*)+")
_DIGIT_RUN = re.compile(r"\d+")
_SEPARATOR = re.compile(r"[,;&]|\\\\|\\cup")
_NUMERIC_POWER = re.compile(r"[\d)}]\s*(?:\^|\*\*)\s*\{?\s*[-+]?\d")
_FACTORIAL = re.compile(r"(\d+)\s*!")
_NESTED_FACTORIAL = re.compile(r"[)}!\]]\s*!")
_BINOMIAL = re.compile(r"\\[dt]?binom\s*\{?\s*(\d+)\s*\}?\s*\{?\s*(\d+)")
_OPENING, _CLOSING = "{([", "})]"


def _deepest(text: str) -> int:
    """The deepest nesting of brackets, or of powers without braces (a^b^c) if deeper."""
    depth = deepest = 0
    for character in text:
        if character in _OPENING:
            depth += 1
            deepest = max(deepest, depth)
        elif character in _CLOSING:
            depth = max(depth - 1, 0)
    chains = (len(re.findall(r"\^|\*\*", chain[0])) for chain in _POWERS.finditer(text))
    return max(deepest, *chains, 0)


def _exponents(text: str) -> Iterator[str]:
    """Yield each exponent that is not inside another exponent: the group or token after ^ or **."""
    position = 0
    while (start := _next_power(text, position)) is not None:
        end = _group_end(text, start)
        yield text[start:end]
        position = max(end, start + 1)


def _next_power(text: str, position: int) -> int | None:
    found = re.compile(r"(?:\^|\*\*)\s*").search(text, position)
    return None if found is None else found.end()


def _group_end(text: str, start: int) -> int:
    """Index behind the bracketed group that begins at `start`, with any power that follows at once.
    Without a group: index behind the characters that can belong to one exponent."""
    if start < len(text) and text[start] in _OPENING:
        depth = 0
        for index in range(start, len(text)):
            depth += (text[index] in _OPENING) - (text[index] in _CLOSING)
            if depth == 0:
                return index + 1
        return len(text)
    run = re.compile(r"[-+]?[\w.!]*(?:(?:\^|\*\*)\s*[-+{]*[\w.!]*)*").match(text, start)
    return start if run is None else run.end()


# -- extraction ----------------------------------------------------------------------------------


def extract(text: str, methods: Sequence[str], caps: Caps) -> tuple[str | None, str]:
    """The final answer, and the method that found it, which is the first in `methods` that finds
    one. The answer is None if no method finds one, or the one that does finds an empty text."""
    for method in methods:
        found = _FINDERS[method](text, caps)
        if found is not None:
            answer = found.strip()
            return (answer or None), method
    return None, ""


@dataclass(frozen=True, slots=True)
class _Box:
    start: int
    """Index in the text at which the box's command begins."""
    inside: int
    end: int | None
    """Index of the brace that closes the box. None: the box is never closed."""


def _boxes(text: str) -> list[_Box]:
    """The boxes that are not inside another closed box, in their order. Takes one pass."""
    first = re.search(r"\\(?:boxed|fbox)\s{0,8}\{", text)
    if first is None:
        return []
    stack: list[re.Match[str] | None] = []
    closed: list[_Box] = []
    for found in _BOX_OR_BRACE.finditer(text, first.start()):
        token = found[0]
        if token == "{":
            stack.append(None)
        elif token == "}":
            opened = stack.pop() if stack else None
            if opened is not None:
                while closed and closed[-1].start > opened.start():
                    closed.pop()
                closed.append(_Box(opened.start(), opened.end(), found.start()))
        elif len(token) > 2:
            stack.append(found)
    unclosed = [_Box(one.start(), one.end(), None) for one in stack if one is not None]
    return sorted([*closed, *unclosed], key=lambda box: box.start)


def _boxed(text: str, caps: Caps) -> str | None:
    """The content of the last box, joined by commas with boxes directly before it. Empty if that
    box is not closed or there are more than `caps.boxes` different boxes. None: no box."""
    boxes = _boxes(text)
    if not boxes:
        return None
    if boxes[-1].end is None:
        return ""
    if len({text[box.inside : box.end] for box in boxes if box.end is not None}) > caps.boxes:
        return ""
    together = [boxes[-1]]
    for box in reversed(boxes[:-1]):
        if box.end is None:
            break
        between = text[box.end + 1 : together[-1].start]
        if len(between) > _NEAR or not _BETWEEN.fullmatch(between):
            break
        together.append(box)
    contents = [text[box.inside : box.end].strip() for box in reversed(together)]
    answer = ", ".join(dict.fromkeys(contents))
    return answer if len(together) > 1 else _without_inner_box(contents[0])


def _without_inner_box(content: str) -> str:
    r"""The content of the inner box if the content is a single box: 3 for `\boxed{\boxed{3}}`."""
    found = re.match(r"\s*\\(?:boxed|fbox)\s{0,8}\{", content)
    return content[found.end() : -1].strip() if found and content.endswith("}") else content


def _after_hashes(text: str, caps: Caps) -> str | None:
    _, mark, after = text.rpartition("####")
    return _line(after) if mark else None


def _answer_is(text: str, caps: Caps) -> str | None:
    ends = [found.end() for found in _ANSWER_IS.finditer(text)]
    if not ends:
        return None
    rest = text[ends[-1] :].lstrip(" *:\n")
    return re.split(r"\.(?=\s|$)", _line(rest), maxsplit=1)[0]


def _last_line(text: str, caps: Caps) -> str | None:
    text = text.strip()
    return _line(text.rpartition("\n")[2]) if text else None


def _line(text: str) -> str:
    return text.strip().partition("\n")[0].strip().strip("*").strip()


_FINDERS = {
    "boxed": _boxed,
    "hashes": _after_hashes,
    "answer_is": _answer_is,
    "last_line": _last_line,
}

# -- comparing text ------------------------------------------------------------------------------

_NO_SPACE = re.compile(r"\\(?:left|right)(?![A-Za-z])|\\[,;:! ]|[\s$~]")
_BETWEEN_DIGITS = re.compile(r"(?<=\d)(?:\\[,;:! ]|[\s$~])+(?=\d)")
_OPERATION = re.compile(
    r"[-+*/^!]|\\(?:sqrt|cdot|times|div|binom|sin|cos|tan|log|ln|int|sum|prod|lim)"
)
_WRITTEN_OUT = re.compile(r"-?(?:[\d.,]+(?:/\d+)?|\\[dt]?frac\{-?\d+\}\{-?\d+\})")
_DEGREE = re.compile(r"\^\{?\\circ\}?")
_LOOSE = re.compile(
    r"\s*([-+*/^_]|\\(?:cdot|times|div)(?![A-Za-z]))\s*|([({|]|\\[A-Za-z]+)\s+|\s+([)}])"
)
_INNER = frozenset("\\{}^_+-*/")
"""Characters next to which an expression is only a part of a longer expression."""
_UNSURE = re.compile(r"nan|infty|inf|∞|0\^|0/0|\{0\}|/0")


def squash(text: str) -> str:
    """The text without spaces, dollar signs, and commands for the sizes of brackets. `1 1/2` does
    not become `11/2`."""
    return _NO_SPACE.sub("", _BETWEEN_DIGITS.sub("_", text))


def same_text(gold: str, answer: str) -> bool:
    """Whether two answers are equal as text. False for nan or 0/0, which equal nothing."""
    plain = squash(answer)
    return bool(plain) and plain == squash(gold) and not _UNSURE.search(plain.lower())


def restates(answer: str, prompt: str | list[dict[str, Any]] | Any, gold: str) -> bool:
    """Whether the answer only repeats an expression of the prompt, such as a sum that was to be
    worked out, and the right answer `gold` is not that expression."""
    plain = squash(answer)
    if plain == squash(gold) or _WRITTEN_OUT.fullmatch(plain):
        return False
    if len(plain) < 3 or not _OPERATION.search(_DEGREE.sub("", plain).lstrip("+-")):
        return False
    wanted, text = _tight(answer), _tight(_prompt_text(prompt))
    at = text.find(wanted)
    while at >= 0:
        before, after = text[at - 1 : at], text[at + len(wanted) : at + len(wanted) + 1]
        if not (before.isalnum() or after.isalnum() or before in _INNER or after in _INNER):
            return True
        at = text.find(wanted, at + len(wanted))
    return False


def _tight(text: str) -> str:
    text = re.sub(r"\\(?:left|right)(?![A-Za-z])|\\[,;:!]|\$|\s+", " ", text)
    return _LOOSE.sub(lambda m: m[1] or m[2] or m[3], text).strip()


def _prompt_text(prompt: str | list[dict[str, Any]] | Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(
        str(message.get("content", "")) for message in prompt if isinstance(message, Mapping)
    )
