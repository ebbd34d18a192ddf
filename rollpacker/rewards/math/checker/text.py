r"""Brings the text of a mathematical answer to one spelling, splits it, and reads numbers.

First part of the program that judges answers inside the sandbox (see check.py). It needs only the
standard library, and works on text alone.
"""

# ruff: noqa: RUF001 (the characters are what this file is about)

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from typing import Any, NamedTuple


class Unreadable(Exception):
    """Text that is no mathematics which this program can read."""


class Undefined(Exception):
    """A value such as 0/0, which is equal to nothing."""


# -- text ----------------------------------------------------------------------------------------

_CHARACTERS = {
    **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\ufe63\uff0d", "-"),
    **{"×": r"\times ", "⋅": r"\cdot ", "·": r"\cdot ", "÷": "/", "∕": "/", "⁄": "/"},
    **{"π": r"\pi ", "∞": r"\infty ", "°": r"^\circ ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne "},
    **{"∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "±": r"\pm ", "′": "'"},
    **{"ℝ": r"\mathbb{R}", "−": "-", "≈": r"\approx ", "，": ",", "٫": ".", "٬": ","},
    **{"½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}"},
    **{"¾": r"\frac{3}{4}", "⅕": r"\frac{1}{5}", "⅛": r"\frac{1}{8}", "€": r"\text{euro}"},
    **{"£": r"\text{pound}", "“": "", "”": "", "…": r"\ldots "},
}
_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-", strict=True))
_OPERATORS = "arc(?:sin|cos|tan)|sinh|cosh|tanh|ln|log|lcm|gcd|max|min|det"
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\(?:left|right)\s*\.", ""),
        (r"\\(?:left|right|[bB]ig{1,2}[lrm]?)(?![A-Za-z])", ""),
        (r"\\(?:displaystyle|textstyle|limits)(?![A-Za-z])", ""),
        (r"\\(?:d|t|c)frac(?![A-Za-z])", r"\\frac"),
        (r"\\(?:lbrace)(?![A-Za-z])", r"\\{"),
        (r"\\(?:rbrace)(?![A-Za-z])", r"\\}"),
        (r"\\(?:lbrack)(?![A-Za-z])", "["),
        (r"\\(?:rbrack)(?![A-Za-z])", "]"),
        (r"\\(?:lvert|rvert|vert)(?![A-Za-z])", "|"),
        (r"\\(?:leq|leqslant)(?![A-Za-z])", r"\\le "),
        (r"\\(?:geq|geqslant)(?![A-Za-z])", r"\\ge "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\neq(?![A-Za-z])", r"\\ne "),
        (r"\\(?:varnothing|O)(?![A-Za-z])", r"\\emptyset "),
        (r"\\colon(?![A-Za-z])", ":"),
        (r"\\(?:lor|vee)(?![A-Za-z])", r"\\text{ or }"),
        (r"\\(?:ast|cdotp)(?![A-Za-z])", r"\\cdot "),
        (r"\\(?:math|text)(?:bf|it|rm|sf|tt|normal)\s*\{|\\(?:mbox|rm)\s*\{", r"\\text{"),
        (r"\\text\s*\{\s*([A-Za-z]|-?[\d.,]*\d)\s*\}", r" \1 "),
        (r"\\operatorname\*?\s*\{\s*(" + _OPERATORS + r")\s*\}", r"\\\1 "),
        (r"\\\$|\\text\s*\{\s*\\?\$\s*\}", r"\\text{dollar}"),
        (r"\$|\\\(|\\\)|(?<!\\)\\\[|(?<!\\)\\\]", " "),
        (r"(?<=\d)\\[,!]\s*(?=\d{3}(?!\d))", "\u2063"),
        (r"\\(?:[,;:!]|quad(?![A-Za-z])|qquad(?![A-Za-z]))|(?<!\\)\\ |~", " "),
        (r"\{\s*,\s*\}", "{,}"),
        (r"(?<=\d)\{,\}(?=\d)", "\u2063"),
        (r"\{,\}", ","),
        (r"\\%|\\text\s*\{\s*(?:\\?%|percent|per cent)\s*\}|\b(?:percent|per cent)\b", "%"),
        (r"\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![A-Za-z])|\\degree(?![A-Za-z])", r"\\text{degree}"),
        (r"\\textdegree", r"\\text{degree}"),
        (r"\*\*", "^"),
        (r"\^\s*-\s*(\d+)", r"^{-\1}"),
        (r"\\log\s*_\s*(?:e|\{\s*e\s*\})(?![A-Za-z])", r"\\ln "),
        # A fraction times a letter: the parser would put the letter into the denominator.
        (r"(?<![\w.}^_/])(\d+)\s*/\s*(\d+)\s*(?=[A-Za-z])(?![A-Za-z]{2})", r"\\frac{\1}{\2} "),
        (r"\s+", " "),
    ]
]  # fmt: skip
NO_LETTER = r"(?![A-Za-z])"
_SPACED_THOUSANDS = re.compile(r"(?<![\w.,/^}\u2063])\d{1,3}(?: \d{3})+(?![\w/.,]|\s*[/\d])")
"""Matches digits in groups of three: 10 000, but not the mixed number `1 500/1000`."""


def clean(text: str) -> str:
    """Return the text with one spelling for signs and commands that mean the same."""
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda m: "^{" + _plain_superscript(m[0]) + "}", text)
    text = re.sub(r"√\s*(\d+|[a-z])", r"\\sqrt{\1}", text)
    text = re.sub(r"√\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = "".join(_CHARACTERS.get(character, character) for character in text)
    text = "".join(_ascii(character) for character in unicodedata.normalize("NFKC", text))
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _SPACED_THOUSANDS.sub(lambda found: found[0].replace(" ", "\u2063"), text)
    text = text.replace("\\text{ or}", "\\text{ or }").strip()
    text = re.sub(r"(?<=[^\\])[.;,]$", "", text).strip()
    while (inner := wrapped(text, "{", "}")) is not None and not text.startswith("\\"):
        text = inner.strip()
    return text


def _plain_superscript(text: str) -> str:
    return "".join(_SUPERSCRIPTS[character] for character in text)


def _ascii(character: str) -> str:
    if character.isascii():
        return character
    if unicodedata.category(character) == "Cf" and character != "\u2063":
        return ""
    digit = unicodedata.decimal(character, None)
    return character if digit is None else str(digit)


def wrapped(text: str, opening: str, closing: str) -> str | None:
    """The text inside the brackets `opening` and `closing` if they enclose it all, else None."""
    if not (text.startswith(opening) and text.endswith(closing)):
        return None
    inner = text[len(opening) : len(text) - len(closing)]
    if len(text) < len(opening) + len(closing):
        return None
    if closing == "}" and text.endswith("\\}"):
        return None
    depth = 0
    for token in _TOKEN.findall(inner):
        depth += (token in _OPEN) - (token in _CLOSE)
        if depth < 0:
            return None
    return inner if depth == 0 else None


_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|.", re.DOTALL)
_OPEN, _CLOSE = {"{", "(", "[", "\\{", "\\langle"}, {"}", ")", "]", "\\}", "\\rangle"}


def split(text: str, is_separator: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """The parts of a text between separators that are outside of all brackets, and these
    separators. Raises `Unreadable` for an unopened bracket."""
    parts, separators, depth, start, position = [], [], 0, 0, 0
    while position < len(text):
        if depth == 0 and (found := is_separator.match(text, position)):
            parts.append(text[start:position].strip())
            separators.append(found[0].strip())
            start = position = found.end()
            continue
        token = _TOKEN.match(text, position)
        assert token is not None
        depth += (token[0] in _OPEN) - (token[0] in _CLOSE)
        if depth < 0:
            raise Unreadable("a bracket that nothing opened")
        position = token.end()
    return [*parts, text[start:].strip()], separators


_THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3})((?:,\d{3})+)(?!\d|,\d)")


def joined_thousands(text: str) -> str:
    """The text with 1,234 as one number: its commas become characters that `number` drops."""
    return _THOUSANDS.sub(lambda m: m[0].replace(",", "\u2063"), text)


def squashed(text: str) -> str:
    """The text without spaces and invisible separators. A space between digits stays: `1 1/2` is
    not `11/2`."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)|\u2063", "", text)


# -- numbers -------------------------------------------------------------------------------------


class Number(NamedTuple):
    value: Fraction
    decimals: int | None = None
    """Number of decimal places. None: the number is exact."""
    digits: int = 0
    """Number of significant digits of a decimal; 0 for other numbers."""


_SIGN = r"(?P<sign>[+-]?)\s*"
_DECIMAL = re.compile(_SIGN + r"(?P<whole>\d*)(?:\.(?P<places>\d*))?$")
_REPEATING = re.compile(
    _SIGN + r"(?P<whole>\d*)\.(?P<places>\d*)\\(?:overline|bar|dot)\s*\{?\s*(?P<period>\d+)\s*\}?$"
)
_FRACTION = re.compile(
    _SIGN
    + r"(?P<mixed>\d+(?:\s*(?=\\frac)|\s+))?"
    + r"(?:\\frac\s*(?:\{\s*(?P<top>-?\d+)\s*\}|(?P<top1>\d))\s*"
    + r"(?:\{\s*(?P<bottom>-?\d+)\s*\}|(?P<bottom1>\d))"
    + r"|(?P<top2>\d+)\s*/\s*(?P<bottom2>\d+))$"
)
_SCIENTIFIC = re.compile(
    r"(?P<factor>[+-]?\s*\d+(?:\.\d*)?)\s*(?:(?:\\times|\\cdot|\*)\s*10\s*\^\s*"
    r"(?:\{\s*(?P<braced>[+-]?\d+)\s*\}|(?P<single>-?\d+))|[eE](?P<e>[+-]?\d+))$"
)
_MAX_POWER_OF_TEN = 10_000


def number(text: str) -> Number | None:
    """The number that the text writes out: a decimal, a fraction, or a decimal times a power of
    ten. None if the text is anything else. Raises `Undefined` for a division by zero."""
    text = text.replace("\u2063", "").strip()
    while text.startswith("(") and (inner := wrapped(text, "(", ")")) is not None:
        text = inner.strip()
    if (found := _DECIMAL.match(text)) and (found["whole"] or found["places"]):
        places = found["places"] or ""
        value = Fraction(int(found["whole"] + places or "0"), 10 ** len(places))
        digits = len((found["whole"] + places).lstrip("0"))
        return Number(_signed(found, value), len(places) or None, digits)
    if found := _REPEATING.match(text):
        places, period = found["places"], found["period"]
        scale = 10 ** len(places)
        value = Fraction(int(found["whole"] + places or "0"), scale)
        value += Fraction(int(period), (10 ** len(period) - 1) * scale)
        return Number(_signed(found, value))
    if found := _FRACTION.match(text):
        top = found["top"] or found["top1"] or found["top2"]
        bottom = int(found["bottom"] or found["bottom1"] or found["bottom2"])
        if bottom == 0:
            raise Undefined("a division by zero")
        return Number(_signed(found, int(found["mixed"] or 0) + Fraction(int(top), bottom)))
    if found := _SCIENTIFIC.match(text):
        factor = number(found["factor"])
        power = int(found["braced"] or found["single"] or found["e"])
        if factor is not None and abs(power) <= _MAX_POWER_OF_TEN:
            decimals = max((factor.decimals or 0) - power, 0)
            return Number(factor.value * Fraction(10) ** power, decimals or None, factor.digits)
    return None


def _signed(found: re.Match[str], value: Fraction) -> Fraction:
    return -value if found["sign"] == "-" else value


def stands_for(decimal: Number, value: Any, min_digits: int) -> bool:
    """Whether the decimal is `value` rounded or cut off, with at least `min_digits` digits."""
    if decimal.decimals is None or decimal.digits < min_digits:
        return False
    one = Fraction(1, 10**decimal.decimals)
    beyond = abs(value) - abs(decimal.value)
    if (value < 0) != (decimal.value < 0):
        return False
    return bool(-one / 2 <= beyond < one)


def same_number(gold: Number, answer: Number, min_digits: int) -> bool:
    """Whether two numbers are equal, or one is the other, rounded or cut off to a decimal of at
    least `min_digits` digits. Whole numbers never count as rounded."""
    if gold.value == answer.value:
        return True
    coarse, fine = gold, answer
    if gold.decimals and answer.decimals:
        if answer.decimals < gold.decimals:
            coarse, fine = answer, gold
        return coarse.decimals != fine.decimals and stands_for(coarse, fine.value, min_digits)
    for decimal, exact in ((gold, answer), (answer, gold)):
        if decimal.decimals and not exact.decimals and exact.value.denominator != 1:
            return stands_for(decimal, exact.value, min_digits)
    return False
