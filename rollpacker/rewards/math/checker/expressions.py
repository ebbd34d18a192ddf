r"""Whether two expressions or relations are equal: by value, by their values at some points, or
according to math-verify.

Third part of the program that judges answers inside the sandbox (see check.py), and the only one
that uses sympy.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from rollpacker.rewards.math.checker.structure import DEGREES, EQUALS, RELATION
from rollpacker.rewards.math.checker.text import (
    Number,
    Undefined,
    Unreadable,
    split,
    squashed,
    stands_for,
)

_DIGITS = 36
_POINTS = 5
_SUBSCRIPT = re.compile(r"[\d)]\s*_")
_SIDE_BY_SIDE = re.compile(r"\d\s+\d|(?:\\pi|[)}])\s*\d|(?<![A-Za-z\\])[A-Za-z]\d")
_TAKES_ARGUMENT = re.compile(
    r"\\(?:sum|int|prod|lim|log|ln|sinh?|cosh?|tanh?|cot|sec|csc)(?![A-Za-z])"
)
"""Matches commands (log, sum) after which, or in whose limits, a number needs no operator."""


def same_expression(
    gold: str, gold_number: Number | None, answer: str, answer_number: Number | None, digits: int
) -> bool:
    """Whether two expressions are equal: by value if they have no variables, else by their values
    at some points. `gold_number` and `answer_number`: None for what is not written as a number.
    `digits`: fewest digits of a rounded decimal."""
    import sympy

    right, given = parse(gold), parse(answer)
    if not (isinstance(right, sympy.Expr) and isinstance(given, sympy.Expr)):
        return same_by_math_verify(right, given)
    if not (right.free_symbols or given.free_symbols):
        return _same_constants(right, gold_number, given, answer_number, digits)
    if right.has(sympy.oo, -sympy.oo) or given.has(sympy.oo, -sympy.oo):
        return bool(right == given)
    verdict = _same_at_points(right, given)
    return same_by_math_verify(right, given) if verdict is None else verdict


def _same_constants(
    gold: Any, gold_number: Number | None, answer: Any, answer_number: Number | None, digits: int
) -> bool:
    one, other = _numeric(gold), _numeric(answer)
    if one is None or other is None:
        return same_by_math_verify(gold, answer)
    if _close(one, other):
        return True
    for decimal, value in ((gold_number, other), (answer_number, one)):
        if decimal is not None and decimal.decimals and value.is_Float:
            return stands_for(decimal, Fraction(str(value)), digits)
    return False


def _numeric(expression: Any, point: dict[Any, Any] | None = None) -> Any:
    """The numeric value of an expression, with its variables as in `point`. None: it has none.
    Raises `Undefined` for values such as 0^0."""
    import sympy

    value = expression.xreplace(point) if point else expression
    if any(p.base.is_zero and p.exp.is_zero for p in value.atoms(sympy.Pow)):
        raise Undefined("0^0")
    if not point and value in (sympy.oo, -sympy.oo):
        return value
    value = value.evalf(_DIGITS)
    if value.has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo, sympy.AccumBounds):
        raise Undefined("no definite value")
    real, imaginary = value.as_real_imag()
    if not (real.is_Number and imaginary.is_Number):
        return None
    return real if abs(imaginary) < 10 ** (-_DIGITS + 10) * (1 + abs(real)) else value


def _close(one: Any, other: Any) -> bool:
    import sympy

    if one == other:
        return True
    if not (one.is_finite and other.is_finite):
        return False
    size = max(abs(one), abs(other))
    return bool(sympy.Abs(one - other) < size * sympy.Float(10) ** (-_DIGITS + 12))


def _points(symbols: set[Any]) -> list[dict[Any, Any]]:
    """Values for the variables at which no ordinary expression behaves specially, of both signs,
    small and large: one mapping from symbol to number per point."""
    import sympy

    ordered = sorted(symbols, key=str)
    return [
        {
            symbol: sympy.Rational(
                (-1) ** ((index + row) % 3 == 2) * (37 + 101 * row + 29 * index), 53 + 10 * index
            )
            for index, symbol in enumerate(ordered)
        }
        for row in range(_POINTS)
    ]


def _values_at_points(one: Any, other: Any) -> list[tuple[Any, Any]]:
    """Pairs of both expressions' values at the points where both have a value; only the real ones
    if there are at least three."""
    pairs = []
    for point in _points(one.free_symbols | other.free_symbols):
        try:
            values = _numeric(one, point), _numeric(other, point)
        except Undefined:
            continue
        if values[0] is not None and values[1] is not None:
            pairs.append(values)
    real = [pair for pair in pairs if pair[0].is_real and pair[1].is_real]
    return real if len(real) >= 3 else pairs


def _same_at_points(gold: Any, answer: Any) -> bool | None:
    pairs = _values_at_points(gold, answer)
    if any(not _close(*pair) for pair in pairs):
        return False
    return True if len(pairs) >= 3 else None


def same_relation(gold: str, answer: str) -> bool:
    """Whether two equations or inequalities, given as text, are the same: equal up to a constant
    factor, or the same according to the package math-verify."""
    if squashed(gold) == squashed(answer):
        return True
    sides = [split(text, EQUALS)[0] for text in (gold, answer)]
    if all(len(pair) == 2 for pair in sides):
        one, other = (parse(left) - parse(right) for left, right in sides)
        pairs = _values_at_points(one, other)
        ratios = [b / a for a, b in pairs if a != 0 and b != 0]
        if len(ratios) == len(pairs) >= 3 and all(_close(ratios[0], r) for r in ratios):
            return True
        if not _has_solution(one):
            return False  # as sets of solutions all such equations are equal
    elif not (RELATION.search(gold) and RELATION.search(answer)):
        return False
    return same_by_math_verify(parse(gold), parse(answer))


def _has_solution(difference: Any) -> bool:
    """Whether the expression may be 0 for real values. True if it has several variables."""
    import sympy

    symbols = difference.free_symbols
    if not symbols:
        return bool(difference.is_zero)
    if len(symbols) > 1:
        return True
    return bool(sympy.solveset(difference, next(iter(symbols)), sympy.Reals) != sympy.EmptySet)


def same_by_math_verify(gold: Any, answer: Any) -> bool:
    from math_verify.grader import verify

    same = verify(
        gold, answer, timeout_seconds=None, raise_on_error=True, allow_set_relation_comp=True
    )
    return bool(same)


_parsed: dict[str, Any] = {}


def parse(text: str) -> Any:
    """The sympy expression for a text. Raises `Unreadable` if it cannot be parsed."""
    if text not in _parsed:
        if len(_parsed) > 100:
            _parsed.clear()
        _parsed[text] = _parse(text)
    return _parsed[text]


def _parse(text: str) -> Any:
    import sympy
    from latex2sympy2_extended.latex2sympy2 import (
        ConversionConfig,
        NormalizationConfig,
        normalize_latex,
    )
    from math_verify.grader import should_treat_as_complex

    config = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none"
    )
    text = DEGREES.sub(r"(\1\\cdot\\frac{\\pi}{180})", text.replace("\u2063", ""))
    text = re.sub("'+", lambda m: "^{" + r"\prime" * len(m[0]) + "}", text)
    plain = normalize_latex(text, config)
    if not plain or (_SIDE_BY_SIDE.search(plain) and not _TAKES_ARGUMENT.search(plain)):
        raise Unreadable("a number behind another thing, without a sign between them")
    if _SUBSCRIPT.search(plain):
        raise Unreadable("a number with a subscript")
    converter = _converter()(
        is_real=not should_treat_as_complex(plain), config=ConversionConfig(lowercase_symbols=False)
    )
    try:
        expression = converter.parse(plain)
    except RecursionError:
        raise
    except Exception as error:
        said = str(error).split("\n")[0].strip()[:80] or type(error).__name__
        raise Unreadable(f"the parser says: {said}") from None
    if expression is None or isinstance(expression, list | dict | str | bool):
        raise Unreadable("no expression")
    if expression.has(sympy.nan, sympy.zoo):
        raise Undefined("no definite value")
    constants = {symbol: sympy.I for symbol in expression.free_symbols if symbol.name == "i"}
    return expression.xreplace(constants) if constants and "\\sum" not in plain else expression


_converter_class: Any = None


def _converter() -> Any:
    """math-verify's class of LaTeX parsers, with exact decimals, and 2(3) as 6, no mixed number."""
    global _converter_class
    if _converter_class is not None:
        return _converter_class
    import sympy
    from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy

    class Exact(_Latex2Sympy):  # type: ignore[misc]  # the package has no types
        def parse_number(self, text: str) -> Any:
            return sympy.Rational(text.replace(",", ""))

        def convert_postfix_list(self, arr: Any, i: int = 0) -> Any:
            first = self.convert_postfix(arr[i])
            if not isinstance(first, sympy.Expr) or not first.is_Integer or i == len(arr) - 1:
                return super().convert_postfix_list(arr, i)
            rest = self.convert_postfix_list(arr, i + 1)
            is_fraction = getattr(rest, "is_Rational", False) and not rest.is_Integer
            if is_fraction and arr[i + 1].getText().startswith("\\frac") and i + 2 == len(arr):
                return first + rest if first >= 0 else first - rest
            if getattr(rest, "is_Matrix", False):
                return self.mat_mul_flat(first, rest)
            return self.mul_flat(first, rest)

    _converter_class = Exact
    return Exact
