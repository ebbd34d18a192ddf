"""Reads and compares values that come out of the sandbox, without ever building them.

What a program returned stays in its plain form (see `harness`), a tree of JSON lists. No object is
made of it: no hash or method of its choosing is called, and there is no `eval` and no pickle.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from rollpacker.rewards.code.harness import MAX_BITS, MAX_DEPTH, Refused, Tree, encode

TOLERANCE = 1e-6
"""Largest difference between a float and the expected value, absolute or relative to that value."""
MAX_LOOSE = 50
"""Most members of a set that are matched with the tolerance. The others must be exactly equal."""
MAX_FRACTION_DIGITS = 4096
"""Most hexadecimal digits of a fraction. Reducing a fraction takes time in their square."""

_HEX = re.compile(rb"-?[0-9a-f]{1,%d}" % (MAX_BITS // 4 + 1))
_EXPONENT = r"p(\+[0-9]{1,3}|\+10[01][0-9]|\+102[0-3]|-[0-9]{1,4})"
_HEX_FLOAT = re.compile(r"-?(0x[01]\.[0-9a-f]{1,13}" + _EXPONENT + r"|inf)|nan")
_DECIMAL = re.compile(r"-?[0-9]{1,400}(\.[0-9]{1,400})?(E[+-]?[0-9]{1,3})?")
_PLAIN_FLOAT = re.compile(rb"[+-]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][+-]?[0-9]{1,4})?")
_PLAIN_NUMBER = re.compile(rb"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,4})?")
_MAX_NUMBER_CHARACTERS = 400


class BadValue(ValueError):
    """Bytes that are not the plain form of a value."""


def plain(value: Any) -> Tree:
    """Plain form (`harness.Tree`) of a value that a test expects. Raises `ValueError` for
    others."""
    try:
        tree = encode(value)
    except Refused as error:
        raise ValueError(str(error)) from None
    check_tree(tree)
    return tree


# -- reading ---------------------------------------------------------------------------


def read_list(data: bytes, name: str) -> list[Any]:
    """Parse `data`, a JSON list that must begin with `name`, and return its other members. They are
    not checked yet. Raises `BadValue` for anything else."""
    try:
        said = json.loads(
            data.decode("ascii"),
            object_pairs_hook=dict,
            parse_int=_small_int,
            parse_float=_refuse,
            parse_constant=_refuse,
        )
    except (ValueError, RecursionError):
        raise BadValue("not one JSON document") from None
    if type(said) is not list or not said or said[0] != name:
        raise BadValue(f"not a list that begins with {name}")
    return said[1:]


def _small_int(text: str) -> int:
    if len(text) > 17:
        raise BadValue("a long integer without a tag")
    return int(text)


def _refuse(text: str) -> Any:
    raise BadValue(f"{text[:20]} is no plain form")


def check_tree(tree: Tree, depth: int = 0, key_depth: int = 0) -> None:
    """Raise `BadValue` unless `tree` is the plain form of a value. `depth`: number of containers
    that the value lies in. `key_depth`: how many of them have it in a set or a dict key."""
    if tree is None or type(tree) in (bool, int, str):
        return
    if type(tree) is not list or not tree or max(depth, 12 * key_depth) > MAX_DEPTH:
        raise BadValue("neither a simple value nor a tagged list, or nested too deeply")
    tag, rest = tree[0], tree[1:]
    if tag in ("l", "t"):
        for item in rest:
            check_tree(item, depth + 1, key_depth)
    elif tag in ("s", "z", "d"):
        keys, values = (rest[::2], rest[1::2]) if tag == "d" else (rest, [])
        if tag == "d" and len(keys) != len(values):
            raise BadValue("a dict with a key that has no value")
        for item in values:
            check_tree(item, depth + 1, key_depth)
        for item in keys:
            check_tree(item, depth + 1, key_depth + 1)
        if len(set(map(key_of, keys))) < len(keys):
            raise BadValue("a set or dict with equal members")
    elif not _is_scalar(tag, rest):
        raise BadValue("an unknown tag, or something else than what belongs to it")


def _is_scalar(tag: Any, rest: Sequence[Any]) -> bool:
    if not all(type(part) is str for part in rest):
        return False
    match tag:
        case "i":
            return len(rest) == 1 and _is_hex(rest[0])
        case "f" | "c":
            return len(rest) == (1 if tag == "f" else 2) and all(map(_HEX_FLOAT.fullmatch, rest))
        case "b":
            digits = rest[0] if len(rest) == 1 else "?"
            return len(digits) % 2 == 0 and not digits.strip("0123456789abcdef")
        case "q":
            short = len(rest) == 2 and max(map(len, rest)) <= MAX_FRACTION_DIGITS
            return short and all(map(_is_hex, rest)) and int(rest[1], 16) > 0
        case "m":
            return len(rest) == 1 and _DECIMAL.fullmatch(rest[0]) is not None
        case _:
            return False


def _is_hex(text: str) -> bool:
    return text.isascii() and _HEX.fullmatch(text.encode()) is not None


# -- comparing -------------------------------------------------------------------------


def same(expected: Tree, got: Tree) -> bool:
    """Whether a program's value equals the expected one. Both are checked plain forms. A number
    equals another by value, whatever its type; if a float is expected, it may differ by
    `TOLERANCE`. nan equals nothing, and a bool only a bool. A list may stand for a tuple and a set
    for a frozenset; sets and dicts are equal in any order."""
    if type(expected) is not list and type(expected) is not int:
        return type(got) is type(expected) and got == expected
    kind, other = _kind(expected), _kind(got)
    if kind == "number" or other == "number":
        return kind == other and _same_number(expected, got)
    if kind != other:
        return False
    assert type(expected) is list
    want, have = expected[1:], got[1:]
    if len(want) != len(have):
        return False
    match kind:
        case "sequence":
            return all(map(same, want, have))
        case "set":
            return _same_set(want, have)
        case "dict":
            values = {key_of(k): v for k, v in zip(have[::2], have[1::2], strict=True)}
            pairs = zip(want[::2], want[1::2], strict=True)
            return all(key_of(k) in values and same(v, values[key_of(k)]) for k, v in pairs)
        case _:
            return bool(want == have)


def _kind(tree: Tree) -> str:
    if type(tree) is int:
        return "number"
    if type(tree) is not list:
        return "simple"
    kinds = {"l": "sequence", "t": "sequence", "s": "set", "z": "set", "d": "dict", "b": "bytes"}
    return kinds.get(tree[0], "number")


def _same_number(expected: Tree, got: Tree) -> bool:
    want, have = number_of(expected), number_of(got)
    if isinstance(want, complex) or isinstance(have, complex):
        want, have = _as_complex(want), _as_complex(have)
        return _close(want.real, have.real) and _close(want.imag, have.imag)
    if isinstance(want, float):
        try:
            return _close(want, float(have))
        except OverflowError:
            return False
    if isinstance(have, float) and not math.isfinite(have):
        return False
    return want == have


def _as_complex(number: int | float | Fraction | complex) -> complex:
    try:
        return complex(number)
    except OverflowError:
        return complex(math.nan)


def _close(expected: float, got: float) -> bool:
    """Whether two floats are equal within the tolerance. inf equals inf; nan equals nothing."""
    if not (math.isfinite(expected) and math.isfinite(got)):
        return expected == got
    return abs(expected - got) <= TOLERANCE * max(1.0, abs(expected))


def number_of(tree: Tree) -> int | float | Fraction | complex:
    if type(tree) is int:
        return tree
    tag, first, *more = tree
    match tag:
        case "i":
            return int(first, 16)
        case "f":
            return float.fromhex(first)
        case "c":
            return complex(float.fromhex(first), float.fromhex(more[0]))
        case "q":
            return Fraction(int(first, 16), int(more[0], 16))
        case _:
            return Fraction(first)


def has_nan(tree: Tree) -> bool:
    """Whether the value has a nan in it, for which code like `not abs(got - want) > 1e-6` holds."""
    if type(tree) is not list:
        return False
    return (tree[0] in ("f", "c") and "nan" in tree[1:]) or any(map(has_nan, tree[1:]))


def key_of(tree: Tree) -> str:
    """A text that is the same for plain forms which are equal without tolerance, such as those of 2
    and 2.0, or of a list and a tuple."""
    kind = _kind(tree)
    if kind == "simple":
        return json.dumps(tree)
    if kind == "bytes":
        return f"b{tree[1]}"
    if kind == "number":
        return _number_key(number_of(tree))
    members = list(map(key_of, tree[1:]))
    if kind == "dict":
        members = [f"{k}:{v}" for k, v in zip(members[::2], members[1::2], strict=True)]
    if kind != "sequence":
        members.sort()
    return f"{kind}({','.join(members)})"


def _number_key(number: int | float | Fraction | complex) -> str:
    if isinstance(number, complex):
        if number.imag:
            return f"c{number.real.hex()} {number.imag.hex()}"
        number = number.real
    if isinstance(number, float) and not math.isfinite(number):
        return str(number)
    top, bottom = number.as_integer_ratio()
    return f"{top:x}/{bottom:x}"


def _same_set(expected: list[Tree], got: list[Tree]) -> bool:
    wanted = {key_of(member): member for member in expected}
    extra = []
    for member in got:
        key = key_of(member)
        if key in wanted:
            del wanted[key]
        else:
            extra.append(member)
    left = list(wanted.values())
    if len(left) != len(extra) or len(left) > MAX_LOOSE:
        return False
    for member in extra:
        match = next((n for n, want in enumerate(left) if same(want, member)), None)
        if match is None:
            return False
        del left[match]
    return True


def same_text(expected: bytes, got: bytes) -> bool:
    """Whether a program's output is the expected one. Line ends may be CRLF; blanks at the end of a
    line and blank lines at the end are ignored. A line that differs is compared by its tokens,
    which blanks separate, if a float (with a point or an exponent) is among the expected ones: a
    number within `TOLERANCE` of a float is right."""
    wanted, found = _lines(expected), _lines(got)
    return len(wanted) == len(found) and all(map(_same_line, wanted, found))


def _lines(text: bytes) -> list[bytes]:
    lines = [line.rstrip(b" \t\r") for line in text.split(b"\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _same_line(expected: bytes, got: bytes) -> bool:
    if expected == got:
        return True
    wanted, found = expected.split(), got.split()
    if len(wanted) != len(found) or not any(map(_is_float, wanted)):
        return False
    return all(map(_same_token, wanted, found))


def _is_float(token: bytes) -> bool:
    return len(token) <= _MAX_NUMBER_CHARACTERS and _PLAIN_FLOAT.fullmatch(token) is not None


def _same_token(expected: bytes, got: bytes) -> bool:
    if expected == got:
        return True
    if not _is_float(expected) or len(got) > _MAX_NUMBER_CHARACTERS:
        return False
    if _PLAIN_NUMBER.fullmatch(got) is None or math.isinf(float(expected)):
        return False
    return _close(float(expected), float(got))
