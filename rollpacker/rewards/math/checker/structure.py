r"""Reads the parts of an answer: names, lists, sets, tuples, intervals, matrices; words and units.

Second part of the program that judges answers inside the sandbox (see check.py).
"""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

from rollpacker.rewards.math.checker.text import (
    NO_LETTER,
    Undefined,
    Unreadable,
    joined_thousands,
    split,
    squashed,
    wrapped,
)

# -- structure -----------------------------------------------------------------------------------


class Value(NamedTuple):
    """One value in an answer, written `name = side = side`. `whole` is this text. If `name` is None
    and there are several sides, it is an equation."""

    sides: tuple[str, ...]
    name: str | None = None
    whole: str = ""


class Group(NamedTuple):
    kind: str
    """The group's form: "list" (values without brackets), "set", "matrix", or the two brackets of
    a tuple or interval, such as "(]"."""
    items: tuple[Any, ...]
    shape: tuple[int, ...] = ()


_COMMA = re.compile(
    r",|;|\\text\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|\\cup"
    + NO_LETTER
)
RELATION = re.compile(r"\\le" + NO_LETTER + r"|\\ge" + NO_LETTER + r"|<=?|>=?")
EQUALS = re.compile(r"(?<![<>!\\:])=")
_UNEQUAL = re.compile(r"\\ne" + NO_LETTER + "|!=")
_ROW, _CELL = re.compile(r"\\\\"), re.compile("&")
_MATRIX = re.compile(
    r"(?:\(|\[)?\s*\\begin\s*\{(?P<kind>[pb]?matrix|smallmatrix|array)\}"
    r"(?:\{[lcr| ]*\})?(?P<rows>.*)"
    r"\\end\s*\{(?P=kind)\}\s*(?:\)|\])?$",
    re.DOTALL,
)
_GREEK = (
    "alpha|beta|gamma|delta|epsilon|varepsilon|theta|lambda|mu|omega|phi|varphi|rho|sigma|tau|psi"
)
_NAME = re.compile(
    r"(?:\\text\s*\{[^{}]*\}|[A-Za-z]{1,3}|\\(?:" + _GREEK + r")|\\(?:angle|triangle)\s*[A-Z]{1,3}"
    r"|\\(?:vec|hat|bar|overline)\s*\{\w+\}|[A-Z]\^\{-1\})"
    r"\s*(?:_\s*(?:\w|\{[^{}]*\}))?'*\s*(?:\(\s*[^()]*\s*\))?$"
)
_NAMED_TUPLE = re.compile(r"\(\s*([A-Za-z](?:\s*,\s*[A-Za-z])+)\s*\)\s*=\s*(?=\()")
"""Matches the names of a tuple, such as (a, b) in (a, b) = (1, 2)."""
_ALL_REAL = re.compile(r"\\mathbb\s*\{?R\}?$|(?:\\text\s*\{)?\s*all real(?: numbers)?\s*\}?$")
_LINE = ("-\\infty", "\\infty")


def read(text: str) -> Value | Group:
    """Read a text that went through `clean` as a value or a group. Raises `Unreadable`."""
    if found := _MATRIX.match(text):
        return _matrix(found["rows"])
    if (found := _NAMED_TUPLE.match(text)) and _is_sorted(found[1]):
        return read(text[found.end() :])
    if _ALL_REAL.match(text):
        return _interval("()", *_LINE)
    members, _ = split(text, re.compile(r"\\in" + NO_LETTER))
    if len(members) == 2 and _NAME.match(members[0]):
        return read(members[1])
    joined = joined_thousands(text)
    parts, _ = split(joined, _COMMA)
    if len(parts) > 1:
        return _list("list", parts)
    for opening, closing in (("\\{", "\\}"), ("\\langle", "\\rangle")):
        if (inner := wrapped(text, opening, closing)) is not None:
            if opening == "\\langle":
                return _list("()", split(inner, _COMMA)[0])
            return _set(inner)
    if text[:1] in ("(", "[") and text[-1:] in (")", "]"):
        inner = wrapped("(" + text[1:-1] + ")", "(", ")")
        parts = split(_joined_spaced(inner), _COMMA)[0] if inner is not None else []
        if len(parts) > 1:
            return _list(text[0] + text[-1], parts)
    return _plus_minus(joined) or _relation(joined)


def _is_sorted(names: str) -> bool:
    letters = re.findall("[A-Za-z]", names)
    return letters == sorted(letters)


def _joined_spaced(text: str) -> str:
    """Return the text inside brackets, with `joined_thousands` applied if a comma is followed by a
    space, as only commas that separate elements are. Else any comma may separate elements."""
    return joined_thousands(text) if re.search(r",\s", text) else text


def _list(kind: str, parts: list[str]) -> Group:
    if not all(parts):
        raise Unreadable("an empty element")
    items = [read(part) for part in parts]
    first = items[0]
    if kind == "list" and isinstance(first, Value) and first.name is not None:
        items = [
            item._replace(name=first.name)
            if isinstance(item, Value) and item.name is None and len(item.sides) == 1
            else item
            for item in items
        ]
    return Group(kind, tuple(items))


def _set(inner: str) -> Value | Group:
    if not inner.strip():
        return Value(("\\emptyset",))
    condition, _ = split(inner, re.compile(r"\\mid" + NO_LETTER + r"|\||:"))
    if len(condition) == 2:
        return read(condition[1])
    return _list("set", split(_joined_spaced(inner), _COMMA)[0])


def _matrix(text: str) -> Group:
    rows = [split(row.strip(), _CELL)[0] for row in split(text.strip(), _ROW)[0] if row.strip()]
    if not rows or len({len(row) for row in rows}) != 1:
        raise Unreadable("rows of different lengths")
    cells = tuple(read(cell) for row in rows for cell in row)
    return Group("matrix", cells, (len(rows), len(rows[0])))


def _plus_minus(text: str) -> Group | None:
    parts, _ = split(text, re.compile(r"\\(?:pm|mp)" + NO_LETTER + r"|\+\s*/\s*-"))
    if len(parts) != 2 or not parts[1]:
        return None
    name, equals, left = parts[0].rpartition("=")
    prefix, left = name + equals, left.strip()
    if not left:
        return Group("list", (read(prefix + parts[1]), read(prefix + "-" + parts[1])))
    return Group("list", tuple(read(f"{prefix}{left}{sign}{parts[1]}") for sign in "+-"))


def _interval(brackets: str, low: str, high: str) -> Group:
    return Group(brackets, (Value((low,)), Value((high,))))


def _relation(text: str) -> Value | Group:
    unequal, _ = split(text, _UNEQUAL)
    if len(unequal) == 2 and _NAME.match(unequal[0]):
        point = unequal[1]
        return Group("list", (_interval("()", _LINE[0], point), _interval("()", point, _LINE[1])))
    sides, relations = split(text, RELATION)
    if relations:
        return _from_inequality(text, sides, relations)
    parts, _ = split(text, EQUALS)
    if not all(parts):
        raise Unreadable("nothing on one side of =")
    if len(parts) > 1 and _NAME.match(parts[0]):
        return Value(tuple(parts[1:]), re.sub(r"\s", "", parts[0]), text)
    return Value(tuple(parts), None, text)


def _from_inequality(text: str, sides: list[str], relations: list[str]) -> Value | Group:
    kinds = [("<" if r[0] == "<" or r == "\\le" else ">", len(r) > 1) for r in relations]
    if len({direction for direction, _ in kinds}) != 1:
        return Value((text,), None, text)
    if kinds[0][0] == ">":
        sides, kinds = sides[::-1], kinds[::-1]
    closed = [is_closed for _, is_closed in kinds]
    if len(sides) == 3 and _NAME.match(sides[1]):
        return _interval("(["[closed[0]] + ")]"[closed[1]], sides[0], sides[2])
    if len(sides) == 2 and _NAME.match(sides[0]):
        return _interval("(" + ")]"[closed[0]], _LINE[0], sides[1])
    if len(sides) == 2 and _NAME.match(sides[1]):
        return _interval("(["[closed[0]] + ")", sides[0], _LINE[1])
    return Value((text,), None, text)


# -- words and units -----------------------------------------------------------------------------

_UNITS = {
    **dict.fromkeys(("m", "meter", "metre"), "m"),
    **dict.fromkeys(("cm", "centimeter", "centimetre"), "cm"),
    **dict.fromkeys(("mm", "millimeter", "millimetre"), "mm"),
    **dict.fromkeys(("km", "kilometer", "kilometre"), "km"),
    **dict.fromkeys(("in", "inch", "inche"), "in"),
    **dict.fromkeys(("ft", "feet", "foot"), "ft"),
    **dict.fromkeys(("s", "sec", "second"), "s"),
    **dict.fromkeys(("min", "minute"), "min"),
    **dict.fromkeys(("h", "hr", "hour"), "h"),
    **dict.fromkeys(("g", "gram"), "g"),
    **dict.fromkeys(("kg", "kilogram"), "kg"),
    **dict.fromkeys(("l", "liter", "litre"), "l"),
    **dict.fromkeys(("mph", "miles per hour", "mile per hour", "miles/hour"), "mph"),
    **dict.fromkeys(("km/h", "kmh", "kph"), "km/h"),
    **dict.fromkeys(("deg", "degree"), "degree"),
    **dict.fromkeys(("usd", "dollar", "bucks"), "dollar"),
    **dict.fromkeys(("radian", "rad"), "radian"),
}
_PLAIN_UNIT = (
    r"(?:(?:sq(?:uare)?|cubic)\.?\s+)?(?:cm|mm|km|kg|mg|ft|feet|foot|inch(?:es)?|yards?|miles?|mph|"
    r"meters?|metres?|centimeters?|grams?|kilograms?|lit(?:er|re)s?|m[lL]|hours?|hrs?|min(?:ute)?s?|"
    r"sec(?:ond)?s?|days?|weeks?|months?|years?|degrees?|dollars?|cents?|euros?|pounds?|units?|"
    r"(?:km|m|miles?)/(?:h|s|hour)|radians?)"
)
_POWER = r"(?:\^\s*(?:\{\s*\d\s*\}|\d))?"
_TEXT_UNIT = re.compile(
    r"(?P<rest>.*[\d)}\w])\s*\\text\s*\{\s*(?P<unit>[A-Za-z][A-Za-z ./]{0,24}?)\s*\}\s*"
    r"(?P<power>" + _POWER + r")\s*(?P<tail>[CF])?$",
    re.DOTALL,
)
_BARE_UNIT = re.compile(
    r"(?P<rest>.*[\d)}])\s*(?P<unit>" + _PLAIN_UNIT + r")\s*(?P<power>" + _POWER + r")(?P<tail>)$",
    re.DOTALL,
)
_LETTER_UNIT = re.compile(
    r"(?P<rest>[^A-Za-z]*\d)\s+(?P<unit>[msghlLNJWVAK])\s*(?P<power>" + _POWER + r")(?P<tail>)$"
)
_NUMBER_WORD = (
    r"(?:(?:ten|hundred|thousand|million|billion|trillion)(?:th)?s|dozens|scores|ones|halves|thirds|"
    r"fourths|quarters|fifths|sixths|sevenths|eighths|ninths|twelfths|times|plus|minus|less)$"
)
_COUNTED = re.compile(
    r"(?P<rest>[+-]?[\d.,\u2063]*\d)\s+(?!" + _NUMBER_WORD + r")"
    r"(?P<unit>people|children|men|women|[A-Za-z]{3,23}s)(?P<power>)(?P<tail>)$"
)
"""Matches a number and a plain word in the plural, such as 12 apples. Other words may be part of
the value (5 million, 2 theta, 3 squared), and so may words of numbers (3 tenths)."""
_CURRENCY = re.compile(
    r"(?P<sign>[+-]?)\s*\\text\s*\{(?P<unit>dollar|euro|pound)\}\s*(?P<rest>.+)$"
)


_ANGLE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)" + NO_LETTER)
DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*\\text\{degree\}")


def take_unit(text: str) -> tuple[str, str]:
    """The text without its unit, and the unit's canonical name ("%" for percent, "" for none)."""
    if text.endswith("%"):
        return text[:-1].strip(), "%"
    if found := _CURRENCY.match(text):
        return found["sign"] + found["rest"], found["unit"]
    for pattern in (_TEXT_UNIT, _BARE_UNIT, _LETTER_UNIT, _COUNTED):
        if (found := pattern.match(text)) and not found["rest"].endswith(("\\", "^")):
            unit = _unit_name(found["unit"], found["power"], found["tail"])
            if unit == "degree" and _ANGLE.search(found["rest"]):
                return text, ""  # of an angle: part of the value
            return found["rest"].strip(), unit
    return text, ""


def _unit_name(unit: str, power: str, tail: str | None) -> str:
    unit = " ".join(unit.rstrip(" .").split())
    for prefix, size in (("square ", "2"), ("sq ", "2"), ("sq. ", "2"), ("cubic ", "3")):
        if unit.lower().startswith(prefix):
            unit, power = unit[len(prefix) :], size
    name = unit if len(unit) == 1 else unit.lower()
    name = _UNITS.get(name) or _UNITS.get(name.removesuffix("s")) or name.removesuffix("s")
    return name + re.sub(r"\D", "", power) + (tail or "")


_TIME = re.compile(
    r"0?(?P<clock>\d{1,2}\s*:\s*[0-5]\d)\s*(?:\\text\s*\{)?\s*(?:(?P<half>[ap])\.?\s?m\.?)?\s*\}?$",
    re.IGNORECASE,
)


def same_time(gold: str, answer: str) -> bool | None:
    """Whether two times of day are the same; either may leave out am or pm. None if they are not to
    be compared as times: the right answer is no time, or the other one is none and the right one
    may be a ratio such as 2:15."""
    if (expected := _TIME.match(gold)) is None:
        return None
    if (found := _TIME.match(answer)) is None:
        # 3:10 may be a ratio as well, which 3/10 is. What names its half of the day is none, and
        # 12:30 as a ratio would be written 2:5.
        hours, minutes = map(int, expected["clock"].split(":"))
        may_be_ratio = expected["half"] is None and math.gcd(hours, minutes) == 1
        return None if may_be_ratio else False
    if squashed(found["clock"]) != squashed(expected["clock"]):
        return False
    halves = {(one["half"] or "").lower() for one in (expected, found)} - {""}
    return len(halves) < 2


_WORDS = re.compile(
    r"\\text\s*\{\s*\(?([^{}]*?)\)?[\s.]*\}$|([A-Za-z][A-Za-z'-]{3,}(?: [A-Za-z'-]+)*)$"
)
_CHOICE = re.compile(r"\(?\s*(?:\\text\s*\{)?\s*\(?([A-Za-z])\)?\s*\}?\s*\)?$")
_NOTHING = {"nan", "notanumber"}


_BASED = re.compile(r"\(?(?P<digits>\d[0-9A-Fa-f]*)\)?\s*_\s*\{?\s*(?P<base>\d+|[a-z]+)\s*\}?$")


def same_based(gold: str, answer: str) -> bool | None:
    """Whether two numbers have the same digits and the same base, where `answer` may leave out the
    base (1011 for 1011_2). None if the right answer `gold` names no base."""
    if (expected := _BASED.match(gold)) is None:
        return None
    found = _BASED.match(answer)
    if found is None:
        return answer.upper() == expected["digits"].upper()
    same_digits = found["digits"].upper() == expected["digits"].upper()
    return same_digits and found["base"] == expected["base"]


def same_words(gold: str, answer: str) -> bool | None:
    """Whether two words, or two letters of a choice, are the same. None if the right answer is
    neither a word nor a letter."""
    for text in (gold, answer):
        if re.sub(r"[^a-z]", "", re.sub(r"\\text", "", text).lower()) in _NOTHING:
            raise Undefined("not a number")
    if (choice := _CHOICE.match(gold)) and (other := _CHOICE.match(answer)):
        letters = choice[1], other[1]
        same_case = letters[0].isupper() == letters[1].isupper()
        wrapped = "(" in gold + answer or "text" in gold + answer
        if letters[0].lower() == letters[1].lower() and (same_case or wrapped):
            return True
    if (words := _WORDS.match(gold)) is None:
        return None
    other_words = _WORDS.match(answer)
    told = other_words[1] or other_words[2] if other_words else answer
    return _plain(words[1] or words[2]) == _plain(told)


def _plain(words: str) -> str:
    return re.sub(r"[\s'\",;:!?]", "", words.casefold()).removesuffix(".")
