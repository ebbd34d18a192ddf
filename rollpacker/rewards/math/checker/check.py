r"""Checks whether an answer is equal to the right one. The program that runs inside the sandbox's
profile "math".

It is sent as text and reads one JSON object from stdin: `nonce`, `pairs` of (right answer, answer),
and the options `form`, `percent`, `min_digits`, `strict`. It writes one JSON object: the nonce, and
for each pair "right", "wrong" or "unknown" with a reason. Policy: docs/rewards-math.md.

Structure (lists, intervals, matrices, units, percent) is read here, from text. Numbers are compared
as exact fractions. math-verify parses expressions and compares what numbers cannot decide. No part
of an answer is ever evaluated as Python.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from rollpacker.rewards.math.checker.expressions import parse, same_expression, same_relation
from rollpacker.rewards.math.checker.structure import (
    Group,
    Value,
    read,
    same_based,
    same_time,
    same_words,
    take_unit,
)
from rollpacker.rewards.math.checker.text import (
    NO_LETTER,
    Number,
    Undefined,
    Unreadable,
    clean,
    number,
    same_number,
    squashed,
)

RIGHT, WRONG, UNKNOWN = "right", "wrong", "unknown"


# -- comparing -----------------------------------------------------------------------------------


class Comparison:
    """Compares a right answer ("gold") with another answer. The options are those of `MathConfig`,
    except `strict`: whether the parser must be able to read a right answer even if equal text will
    do."""

    def __init__(self, *, form: str, percent: str, min_digits: int, strict: bool = False) -> None:
        self.strict = strict
        self.form = form
        self.percent = percent
        self.min_digits = min_digits

    def same(self, gold: Value | Group, answer: Value | Group) -> bool:
        if isinstance(gold, Value) and isinstance(answer, Value):
            return self._same_values(gold, answer)
        if isinstance(gold, Group) and isinstance(answer, Group):
            return self._same_groups(gold, answer)
        # A set of one member may stand for it.
        if isinstance(gold, Group) and gold.kind == "set" and len(gold.items) == 1:
            return self.same(gold.items[0], answer)
        if isinstance(answer, Group) and answer.kind == "set" and len(answer.items) == 1:
            return self.same(gold, answer.items[0])
        return False

    def _same_groups(self, gold: Group, answer: Group) -> bool:
        gold, answer = _vector(gold, answer), _vector(answer, gold)
        unordered = {"list", "set"}
        both_named = _is_named(gold) == _is_named(answer)
        if gold.kind in unordered and answer.kind in unordered and both_named:
            return self._same_members(_distinct(gold), _distinct(answer))
        if gold.kind != answer.kind and {gold.kind, answer.kind} != {"list", "()"}:
            return False
        if gold.shape != answer.shape or len(gold.items) != len(answer.items):
            return False
        if _is_choice(gold) or _is_choice(answer):
            return False
        pairs = zip(_in_order(gold), _in_order(answer), strict=True)
        return all(self.same(one, other) for one, other in pairs)

    def _same_members(self, gold: list[Any], answer: list[Any]) -> bool:
        if len(gold) != len(answer):
            return False
        left = list(answer)
        for member in gold:
            found = next((i for i, other in enumerate(left) if self.same(member, other)), None)
            if found is None:
                return False
            del left[found]
        return True

    def _same_values(self, gold: Value, answer: Value) -> bool:
        if (gold.name is None and len(gold.sides) > 1) or (gold.name and _is_equation(answer)):
            return same_relation(gold.whole, answer.whole)
        if gold.name and answer.name and gold.name != answer.name:
            return _is_product(gold.name) and same_relation(gold.whole, answer.whole)
        last = len(answer.sides) - 1
        return all(
            self._same_side(gold.sides[-1], side, is_last=index == last)
            for index, side in enumerate(answer.sides)
        )

    def _same_side(self, gold: str, answer: str, *, is_last: bool) -> bool:
        if (words := same_words(gold, answer)) is not None:
            return words
        if (based := same_based(gold, answer)) is not None:
            return based
        if (time := same_time(gold, answer)) is not None:
            return time
        plain_gold, gold_unit = take_unit(gold)
        plain_answer, answer_unit = take_unit(answer)
        if (
            gold_unit
            and answer_unit
            and gold_unit != answer_unit
            and "%" not in (gold_unit, answer_unit)
        ):
            return False
        if "%" in (gold_unit, answer_unit):
            if not {gold_unit, answer_unit} <= {"%", ""}:
                return False
            return self._same_percent(plain_gold, gold_unit, plain_answer, answer_unit, is_last)
        return self._same_plain(plain_gold, plain_answer, is_last)

    def _same_percent(
        self, gold: str, gold_unit: str, answer: str, answer_unit: str, is_last: bool
    ) -> bool:
        if gold_unit == answer_unit:
            return self._same_plain(gold, answer, is_last)
        scaled, other = (gold, answer) if gold_unit else (answer, gold)
        size, plain = number(scaled), number(other)
        if size is None or plain is None:
            return False
        if size.value / 100 == plain.value:
            return True
        return self.percent == "lenient" and abs(plain.value) > 1 and size.value == plain.value

    def _same_plain(self, gold: str, answer: str, is_last: bool) -> bool:
        gold_number, answer_number = number(gold), number(answer)
        if gold_number is not None and answer_number is not None:
            return same_number(gold_number, answer_number, self.min_digits)
        if self.strict and gold_number is None:
            parse(gold)
        if squashed(gold) == squashed(answer) and not re.search(r"0\s*\^|\\infty", answer):
            return True
        if (
            is_last
            and self.form == "evaluated"
            and not _worked_out(gold, gold_number, answer, self.min_digits)
        ):
            return False
        return same_expression(gold, gold_number, answer, answer_number, self.min_digits)


def _is_equation(value: Value) -> bool:
    return value.name is None and len(value.sides) > 1


def _vector(group: Group, other: Group) -> Group:
    """Return the group of values, turned into a tuple if it is a matrix of one row or column and
    the other group is no matrix."""
    if group.kind == "matrix" and other.kind != "matrix" and 1 in group.shape:
        return Group("()", group.items)
    return group


def _is_product(name: str) -> bool:
    """Whether a variable's name may also be a product: xy may be a name, or x times y."""
    return name.isalpha() and name.islower() and len(name) > 1


def _is_named(group: Group) -> bool:
    """Whether a group's values have different names, such as x = 1, y = 2: they form a tuple."""
    names = [item.name for item in group.items if isinstance(item, Value)]
    return len(names) == len(group.items) > 1 and None not in names and len(set(names)) > 1


def _is_choice(group: Group) -> bool:
    """Whether all values of a group have one name, such as x = 1, x = 2: they are alternatives."""
    names = [item.name for item in group.items if isinstance(item, Value)]
    return len(names) == len(group.items) > 1 and None not in names and len(set(names)) == 1


def _in_order(group: Group) -> list[Any]:
    """Values of an answer such as `y=2, x=1` in the order in which to compare them: sorted by name
    if all are named and the names are among x, y and z, else as written."""
    if _is_named(group) and {item.name for item in group.items} <= set("xyz"):
        return sorted(group.items, key=lambda item: item.name)
    return list(group.items)


def _distinct(group: Group) -> list[Any]:
    return list(dict.fromkeys(group.items)) if group.kind == "set" else list(group.items)


_CARRY_OUT = re.compile(
    r"\\(int|iint|oint|sum|prod|lim|det|gcd|lcm|max|min|bmod|pmod|mod|lfloor|lceil|operatorname)"
    + NO_LETTER
    + r"|\\frac\s*\{\s*(d|\\partial)\s*[A-Za-z]?\s*\}\s*\{|\\begin\s*\{(vmatrix)"
)
_CLOSED = re.compile(r"[+-]?\s*(?:[\d.\s^{}()!-]|\\binom)+$")
_STILL_TO_DO = re.compile(r"[\d)}!]\s*[-+]|[\d)}!]\s*\(|[\d)}!]\s+\d|\}\s*\d|\)\s*\d")


def _worked_out(gold: str, gold_number: Number | None, answer: str, min_digits: int) -> bool:
    """Whether the answer leaves no work undone (an integral, a sum of numbers) that the right
    answer has done. `gold_number`: None if the right answer is no number. `min_digits`: fewest
    digits with which a decimal counts as rounded, so that other forms of the number are right."""
    if {m[0] for m in _CARRY_OUT.finditer(answer)} - {m[0] for m in _CARRY_OUT.finditer(gold)}:
        return False
    if gold_number is None or (gold_number.decimals and gold_number.digits >= min_digits):
        return True
    return bool(_CLOSED.match(answer)) and not _STILL_TO_DO.search(answer)


# -- the program ---------------------------------------------------------------------------------


def judge(gold: str, answer: str, comparison: Comparison) -> tuple[str, str]:
    """Return "right", "wrong" or "unknown" for an answer, and the reason if it is not "right"."""
    try:
        expected = read(clean(gold))
    except (Unreadable, Undefined) as error:
        return UNKNOWN, f"gold answer: {error}"
    try:
        same = comparison.same(expected, read(clean(answer)))
    except (Unreadable, Undefined) as error:
        return WRONG, str(error)
    return (RIGHT, "") if same else (WRONG, "not equal")


def _refuse(*arguments: Any, **options: Any) -> None:
    raise Unreadable("text is never evaluated")


def main() -> None:
    """Read the request from stdin, judge each pair on its own, and write the reply to stdout."""
    from math_verify import grader
    from sympy.parsing import sympy_parser

    grader.TIMEOUT_WARNING_SHOWN = True  # time is limited from outside
    sympy_parser.eval_expr = _refuse  # whatever reaches for it: parse_expr, sympify of text
    sys.setrecursionlimit(3000)
    request = json.loads(sys.stdin.buffer.read())
    comparison = Comparison(**request["options"])
    verdicts = []
    for gold, answer in request["pairs"]:
        try:
            verdict = judge(gold, answer, comparison)
        except Exception as error:  # of sympy: says nothing about the answer
            verdict = UNKNOWN, f"{type(error).__name__} while comparing"
        verdicts.append(verdict)
    sys.stdout.write(json.dumps({"nonce": request["nonce"], "verdicts": verdicts}))
