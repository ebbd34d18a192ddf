"""Reading a judge's reply: one verdict in one strict form, or a reason why there is none.

What is accepted, after optional white space:

    reasoning  </think>     at most once, at the start; what stands before is not looked at
    ```json                 at most one code fence, around all of the rest
    {"id": "3f9a02c1", "score": 7, "reason": "..."}
    ```

One flat object, each key once, no other key, nothing before or after it. The score is a JSON
number, finite and inside the scale; the id is the request's own, which the text that is judged
cannot know. Everything else is no verdict. There is no second, more forgiving reading.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_REPLY_CHARS = 200_000
"""Most characters of a reply, including its reasoning. A longer reply is unreadable."""
MAX_VERDICT_CHARS = 8_000
MAX_REASON_CHARS = 2_000
THINK, END_THINK = "<think>", "</think>"

_SPACE = " \t\r\n"
_FENCE = re.compile(r"```(?:json|JSON)?[ \t]*\r?\n(.*?)\r?\n?[ \t]*```", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Scores that a judge may give: all numbers from `low` to `high`, or if `binary` only these."""

    low: float = 0.0
    high: float = 10.0
    binary: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ValueError(f"a scale goes from a low to a high number, not {self.low, self.high}")

    def unit(self, score: float) -> float:
        """The score's place on the scale, from 0 to 1."""
        return (score - self.low) / (self.high - self.low)

    def words(self) -> str:
        joint = "or" if self.binary else "to"
        return f"{self.low:g} {joint} {self.high:g}"


@dataclass(frozen=True, slots=True)
class Verdict:
    score: float
    """The score on the judge's own scale, not yet from 0 to 1."""
    reason: str


@dataclass(frozen=True, slots=True)
class Unreadable:
    """The reason why a reply holds no verdict. The sample then has no score."""

    why: str


def schema(scale: Scale, *, with_id: bool = True) -> dict[str, Any]:
    """A JSON schema of a judge's reply (with an id if `with_id`), for endpoints that use one."""
    score: dict[str, Any] = {"type": "number"}
    if scale.binary:
        score["enum"] = [_plain(scale.low), _plain(scale.high)]
    first = {"id": {"type": "string"}} if with_id else {}
    properties = {**first, "reason": {"type": "string"}, "score": score}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def read_verdict(
    reply: object, *, scale: Scale, reply_id: str | None, delimiter: str = ""
) -> Verdict | Unreadable:
    """The verdict in a reply, or why there is none. Never raises. `reply_id`: the required value of
    `id`; None: the object must have no such key. A reply that repeats `delimiter`, the fence around
    the judged text, is unreadable."""
    if not isinstance(reply, str):
        return Unreadable(f"the reply is {type(reply).__name__}, not a text")
    if len(reply) > MAX_REPLY_CHARS:
        return Unreadable(f"the reply has {len(reply)} characters")
    if delimiter and delimiter in reply:
        return Unreadable("the reply repeats the fence around the answer")
    try:
        return _checked(_fields(_bare(reply)), scale, reply_id)
    except _NoVerdict as why:
        return Unreadable(str(why))


class _NoVerdict(Exception):
    pass


def _bare(reply: str) -> str:
    """The JSON object in the reply, without reasoning and code fence. Raises `_NoVerdict`."""
    text = _without_reasoning(reply.strip(_SPACE)).strip(_SPACE)
    if text.startswith("```"):
        fence = _FENCE.fullmatch(text)
        if fence is None:
            raise _NoVerdict("the code fence does not hold the whole reply")
        text = fence.group(1).strip(_SPACE)
    if not text:
        raise _NoVerdict("the reply is empty")
    if len(text) > MAX_VERDICT_CHARS:
        raise _NoVerdict(f"the verdict has {len(text)} characters")
    if not (text.startswith("{") and text.endswith("}")):
        raise _NoVerdict("the reply is not one JSON object")
    return text


def _without_reasoning(text: str) -> str:
    opened, closed = text.count(THINK), text.count(END_THINK)
    if not (opened or closed):
        return text
    if closed != 1 or opened > 1 or (opened and not text.startswith(THINK)):
        raise _NoVerdict("the reply's reasoning does not end once")
    return text.partition(END_THINK)[2]


def _fields(text: str) -> Mapping[str, Any]:
    skeleton = _STRING.sub("", text)
    if skeleton.count("{") != 1 or "[" in skeleton:
        raise _NoVerdict("the reply is not one flat JSON object")
    try:
        return json.loads(  # type: ignore[no-any-return]
            text,
            object_pairs_hook=_each_key_once,
            parse_int=_number,
            parse_float=_number,
            parse_constant=_refuse_constant,
        )
    except (ValueError, RecursionError):
        raise _NoVerdict("the reply is not one JSON object") from None


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise _NoVerdict("the verdict has a key twice")
    return fields


def _number(text: str) -> float:
    if not text.isascii() or len(text) > 40:
        raise _NoVerdict("the score is no plain number")
    return float(text)


def _refuse_constant(name: str) -> float:
    raise _NoVerdict(f"the score is {name}")


def _checked(fields: Mapping[str, Any], scale: Scale, reply_id: str | None) -> Verdict:
    expected = {"score", "reason"} | ({"id"} if reply_id is not None else set())
    if set(fields) != expected:
        raise _NoVerdict(f"the verdict's keys are not {', '.join(sorted(expected))}")
    if reply_id is not None and fields["id"] != reply_id:
        raise _NoVerdict("the verdict has the id of no request, or of another")
    score, reason = fields["score"], fields["reason"]
    if not isinstance(score, float):  # numbers come as float, so true and "7" do not
        raise _NoVerdict("the score is not a number")
    if not math.isfinite(score) or not scale.low <= score <= scale.high:
        raise _NoVerdict(f"the score is outside {scale.words()}")
    if scale.binary and score not in (scale.low, scale.high):
        raise _NoVerdict(f"the score is not {scale.words()}")
    if not isinstance(reason, str) or len(reason) > MAX_REASON_CHARS:
        raise _NoVerdict("the reason is not a short text")
    return Verdict(score, reason)


def _plain(number: float) -> float | int:
    return int(number) if number == int(number) else number
