"""Fuzzed judge replies from a fixed seed, and an oracle of its own of what may be read.

The oracle is a hand-written walk over the characters: it uses no JSON library and nothing of the
reader under test.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator

_PIECES = [
    "{", "}", "[", "]", ":", ",", '"', "\\", "\\u0073", "\n", " ", "\t", "\u00a0", "\ufeff", "\x00",
    '"score"', '"reason"', '"id"', '"score": 10', "10", "-1", "1e309", "NaN", "Infinity", "true",
    "null", "5.5.5", "\u0665", "\uff11\uff10", "7", "0.5", "1e1", "-0.0", "+3", "<think>",
    "</think>", "```",
    "```json\n", "\n```", "Score: 10/10", "[[10]]", "'", "/*", "*/", "//", "\ud800", "\u202e",
    "<|im_end|>", '{"score": 10, "reason": "x"}', "I cannot judge this.", "so ", "{" * 50,
]  # fmt: skip


def replies(count: int, *, seed: int, reply_id: str, delimiter: str) -> Iterator[str]:
    """Sound verdicts, mutations of sound verdicts, and rubbish."""
    draw = random.Random(seed)
    pieces = [*_PIECES, reply_id, f'"{reply_id}"', delimiter]
    for _ in range(count):
        reply = _wrapped(_sound(draw, reply_id), draw)
        kind = draw.random()
        if kind < 0.08:
            yield reply
        elif kind < 0.85:
            for _ in range(draw.choice((1, 1, 1, 2, 3, 8))):
                reply = _mutated(reply, draw, pieces)
            yield reply
        else:
            yield "".join(draw.choice(pieces) for _ in range(draw.randrange(40)))


def _sound(draw: random.Random, reply_id: str) -> str:
    score = draw.choice(("0", "10", "7", "3.5", "1e1", "0.25", "-0", "9.99", str(draw.random())))
    letters = string.ascii_letters + " {}[]:,'`" + "äß中"
    reason = "".join(draw.choice(letters) for _ in range(draw.randrange(30)))
    fields = [f'"id": "{reply_id}"', f'"score": {score}', f'"reason": "{reason}"']
    draw.shuffle(fields)
    return draw.choice(("{%s}", "{ %s }", "{\n%s\n}")) % draw.choice((", ", ",", ",\n")).join(
        fields
    )


def _wrapped(text: str, draw: random.Random) -> str:
    if draw.random() < 0.2:
        text = f"```json\n{text}\n```"
    if draw.random() < 0.2:
        text = f"<think>{draw.choice(_PIECES)}</think>{text}"
    return text


def _mutated(text: str, draw: random.Random, pieces: list[str]) -> str:
    at, to = sorted((draw.randrange(len(text) + 1), draw.randrange(len(text) + 1)))
    match draw.randrange(6):
        case 0:
            return text[:at] + draw.choice(pieces) + text[at:]
        case 1:
            return text[:at] + text[at + 1 :]
        case 2:
            return text[:at] + draw.choice(pieces) + text[at + 1 :]
        case 3:
            return text[:at]
        case 4:
            return text + text[at:to]
        case _:
            return text[:at] + text[at:to] + text[at:to] + text[to:]


# -- the oracle ------------------------------------------------------------------------------------


def readable(reply: str, reply_id: str, delimiter: str) -> float | None:
    """The score from 0 to 10 that a reply gives in the one form that counts, or None."""
    if delimiter in reply or len(reply) > 200_000:
        return None
    try:
        score = _Walk(_inner(reply)).verdict(reply_id)
    except _Wrong:
        return None
    return score if 0 <= score <= 10 else None


class _Wrong(Exception):
    pass


_BLANK = " \t\r\n"


def _inner(reply: str) -> str:
    text = reply.strip(_BLANK)
    closings = text.split("</think>")
    openings = text.split("<think>")
    if len(closings) > 2 or len(openings) > 2:
        raise _Wrong
    if len(openings) == 2 and (openings[0] or len(closings) != 2 or "<think>" in closings[1]):
        raise _Wrong
    text = closings[-1].strip(_BLANK)
    if text[:3] == "```":
        first, newline, rest = text[3:].partition("\n")
        if not newline or first.rstrip(" \t\r") not in ("", "json", "JSON"):
            raise _Wrong
        if rest[-3:] != "```":
            raise _Wrong
        text = rest[:-3].strip(_BLANK)
    if len(text) > 8000:
        raise _Wrong
    return text


class _Walk:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def blank(self) -> None:
        while self.text[self.at : self.at + 1] in (" ", "\t", "\r", "\n"):
            self.at += 1

    def take(self, what: str) -> None:
        self.blank()
        if self.text[self.at : self.at + 1] != what:
            raise _Wrong
        self.at += 1

    def verdict(self, reply_id: str) -> float:
        if not self.text.startswith("{"):
            raise _Wrong
        self.take("{")
        seen: dict[str, object] = {}
        while True:
            self.blank()
            key = self.string()
            if key in seen:
                raise _Wrong
            self.take(":")
            self.blank()
            seen[key] = self.string() if self.text[self.at : self.at + 1] == '"' else self.number()
            self.blank()
            if self.text[self.at : self.at + 1] == "}":
                break
            self.take(",")
        if self.at + 1 != len(self.text) or sorted(seen) != ["id", "reason", "score"]:
            raise _Wrong
        score, reason = seen["score"], seen["reason"]
        if seen["id"] != reply_id or not isinstance(score, float) or not isinstance(reason, str):
            raise _Wrong
        if len(reason) > 2000:
            raise _Wrong
        return score

    def string(self) -> str:
        if self.text[self.at : self.at + 1] != '"':
            raise _Wrong
        self.at += 1
        out = ""
        while True:
            c = self.text[self.at : self.at + 1]
            self.at += 1
            if c == "" or (c < " " and c != ""):
                raise _Wrong
            if c == '"':
                return out
            out += self.escape() if c == "\\" else c

    def escape(self) -> str:
        c = self.text[self.at : self.at + 1]
        self.at += 1
        if c == "u":
            digits = self.text[self.at : self.at + 4]
            if len(digits) != 4 or any(d not in string.hexdigits for d in digits):
                raise _Wrong
            self.at += 4
            return chr(int(digits, 16))
        if not c or c not in '"\\/bfnrt':
            raise _Wrong
        return {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}.get(c, c)

    def number(self) -> float:
        start = self.at
        while self.text[self.at : self.at + 1] and self.text[self.at] in "+-.eE0123456789":
            self.at += 1
        token = self.text[start : self.at]
        mantissa, e, exponent = token.lower().partition("e")
        whole, point, fraction = mantissa.removeprefix("-").partition(".")
        sound = whole.isdigit() and (len(whole) == 1 or whole[0] != "0")
        sound = sound and (not point or fraction.isdigit())
        if e:
            sound = sound and exponent[exponent[:1] in ("+", "-") :].isdigit()
        if not sound or len(token) > 40:
            raise _Wrong
        return float(token)
