"""Plain forms: strict reading, and the policy by which they are compared."""

from __future__ import annotations

import json
import random
import time
from collections import Counter, OrderedDict, deque, namedtuple
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.rewards.code.harness import Refused, decode, encode
from rollpacker.rewards.code.values import (
    BadValue,
    check_tree,
    key_of,
    plain,
    read_list,
    same,
    same_text,
)

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**80), 2**80),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.complex_numbers(allow_nan=False),
    st.fractions(),
    st.decimals(allow_nan=False, allow_infinity=False, places=3),
)
hashable = st.one_of(st.integers(-5, 5), st.text(max_size=2), st.tuples(st.integers(0, 3)))
trees = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(hashable, inner, max_size=4),
        st.sets(hashable, max_size=4),
        st.frozensets(hashable, max_size=4),
    ),
    max_leaves=12,
)


def through_json(tree: Any) -> Any:
    return read_list(json.dumps(["results", tree]).encode(), "results")[0]


@given(trees)
def test_a_value_survives_and_equals_itself(value: Any) -> None:
    tree = through_json(plain(value))
    check_tree(tree)
    assert decode(tree) == value
    assert same(tree, plain(value))
    assert key_of(tree) == key_of(plain(value))


@given(trees, trees)
def test_equal_keys_mean_equal_values(one: Any, two: Any) -> None:
    if key_of(plain(one)) == key_of(plain(two)):
        assert same(plain(one), plain(two)) and same(plain(two), plain(one))


def kind_of(value: Any) -> str:
    return type(value).__name__


def equal(expected: Any, got: Any) -> bool:
    return same(plain(expected), plain(got))


@pytest.mark.parametrize(
    ("expected", "got"),
    [
        (2, 2.0),
        (2.0, 2),
        (0.3, 0.1 + 0.2),
        (1e300, 1e300 * (1 + 1e-9)),
        (0.0, -0.0),
        (float("inf"), float("inf")),
        ([1, (2, 3)], (1, [2, 3])),
        ({1, 2}, frozenset({2, 1})),
        ({1.0, 0.3}, {1, 0.1 + 0.2}),
        ({"a": 1, "b": [2]}, OrderedDict(b=(2,), a=1.0)),
        ({(1, 2): 3}, {(1.0, 2): 3}),
        (0.25, Fraction(1, 4)),
        (2, Decimal("2.00")),
        (0.25, Decimal("0.25")),
        (2**200, 2**200),
        (float(2**60), 2**60),
        (1 + 2j, 1.0000000001 + 2j),
        ({None, 1}, {1, None}),
        ([1, 2], deque([1, 2])),
        ({"a": 2}, Counter("aa")),
        ((1,), namedtuple("P", "x")(1)),
    ],
    ids=kind_of,
)
def test_accepted(expected: Any, got: Any) -> None:
    assert equal(expected, got)


@pytest.mark.parametrize(
    ("expected", "got"),
    [
        (1, True),
        (True, 1),
        (False, None),
        (0, None),
        (None, 0),
        (None, []),
        (1, "1"),
        (5 * 10**8, 5 * 10**8 + 0.5),
        (10**9, 10**9 + 1),
        (0.3, 0.30001),
        (float("nan"), float("nan")),
        (0.0, float("nan")),
        (float("inf"), 1e308),
        (1e308, float("inf")),
        (float("inf"), float("-inf")),
        (1.0, 10**400),
        (0.5, 10**4000),
        (10**400, float("inf")),
        ([1, 2], [2, 1]),
        ([1, 2], {1, 2}),
        ({1, 2}, [1, 2]),
        ("a", b"a"),
        ({"1": 1}, {1: 1}),
        ({"a": 1}, {"a": 1, "b": 2}),
        ([], {}),
        ([], set()),
        ({0.1, 0.2}, {0.1, 0.3}),
        (1j, 1),
        ([None], []),
    ],
    ids=kind_of,
)
def test_refused(expected: Any, got: Any) -> None:
    assert not equal(expected, got)


class _Int(int):
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0

    def __index__(self) -> int:
        return 999


def test_a_subclass_counts_as_what_it_is_for_its_base() -> None:
    assert encode(_Int(3)) == 3 and type(encode(_Int(3))) is int
    assert not equal(4, _Int(3))


@pytest.mark.parametrize(
    "value", [object(), print, int, Ellipsis, NotImplemented, 1 << 500_000], ids=kind_of
)
def test_what_has_no_plain_form(value: Any) -> None:
    with pytest.raises(Refused):
        encode(value)


def test_values_without_end_are_refused() -> None:
    inside: list[Any] = []
    inside.append(inside)
    with pytest.raises(Refused):
        encode(inside)
    with pytest.raises(Refused):
        encode(iter(int, 1))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        '["results"',
        '["results", NaN]',
        '["results", Infinity]',
        '["results", 1.5]',
        '["results", 1e5]',
        '["results", 12345678901234567890]',
        '["results"] ["results"]',
        '["passed"]',
        '\x00["results"]',
        '["results", "\u00e9"]',
        "[" * 100_000,
    ],
)
def test_what_is_not_one_document_is_refused(text: str) -> None:
    with pytest.raises(BadValue):
        read_list(text.encode(), "results")


@pytest.mark.parametrize(
    "tree",
    [
        [],
        [1],
        ["x", "1"],
        ["i"],
        ["i", 5],
        ["i", "xyz"],
        ["i", "0x5"],
        ["i", "5_0"],
        ["i", "f" * 200_000],
        ["f", "1.5"],
        ["f", "0x1.0p+9999"],
        ["f", "NaN"],
        ["f", 1],
        ["c", "inf"],
        ["b", "0"],
        ["b", "zz"],
        ["q", "1", "0"],
        ["q", "1", "-1"],
        ["q", "1", "f" * 5000],
        ["m", "NaN"],
        ["m", "1E99999"],
        ["m", "1_0"],
        ["d", 1],
        ["d", 1, 2, 1, 3],
        ["d", 1, 2, ["f", "0x1.0000000000000p+0"], 3],
        ["s", 1, 1],
        ["s", ["l", 1], ["t", 1]],
        ["h", 0],
        {"a": 1},
        ["l", {}],
        ["l", 1.5],
        ["l", ["l", ["h", 0]]],
    ],
)
def test_what_is_no_plain_form_is_refused(tree: Any) -> None:
    with pytest.raises(BadValue):
        check_tree(tree)


def test_depth_is_bounded() -> None:
    deep: Any = 0
    for _ in range(500):
        deep = ["l", deep]
    with pytest.raises(BadValue):
        check_tree(deep)
    keys: Any = 0
    for _ in range(20):
        keys = ["z", keys]
    with pytest.raises(BadValue):
        check_tree(keys)


def test_hostile_values_take_linear_time() -> None:
    """A set whose members would all have one hash, one deep in keys, big fractions and integers."""
    began = time.thread_time()
    same_hash = ["s", *(["i", f"{n * (2**61 - 1):x}"] for n in range(1, 20_000))]
    check_tree(same_hash)
    assert same(same_hash, same_hash)
    inner: Any = ["l", *range(50_000)]
    for _ in range(8):
        inner = ["z", inner]
    check_tree(inner)
    assert same(inner, inner)
    big = ["i", "f" * 100_000]
    check_tree(big)
    assert not same(["f", "0x1.8000000000000p+0"], big)
    fraction = ["q", "f" * 4000 + "1", "e" * 4000]
    check_tree(fraction)
    assert not same(1, fraction)
    many = ["s", *(["f", (n / 7).hex()] for n in range(5_000))]
    other = ["s", *(["f", (n / 7 + 1e-9).hex()] for n in range(5_000))]
    assert not same(many, other)
    assert time.thread_time() - began < 10


def test_random_bytes_are_never_a_value() -> None:
    """Mutations of real output: read strictly or refused, and nothing else than the value itself,
    in another notation, equals it."""
    rng = random.Random(0)
    expected = plain([1, 2**70, "a", {"k": (True, None)}, {3, 4}, b"b"])
    document = json.dumps(["results", expected]).encode()
    num_read = num_equal = 0
    for _ in range(20_000):
        data = bytearray(document)
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(len(data))
            match rng.randrange(3):
                case 0:
                    data[place] = rng.randrange(256)
                case 1:
                    del data[place]
                case _:
                    data.insert(place, rng.choice(b'[]",0123456789.eE-tfnrul'))
        try:
            (tree,) = read_list(bytes(data), "results")
            check_tree(tree)
        except (BadValue, ValueError):
            continue
        num_read += 1
        if same(expected, tree):
            num_equal += 1
            assert decode(tree) == decode(expected)
    assert 0 < num_equal < num_read < 20_000


@pytest.mark.parametrize(
    ("expected", "got"),
    [
        (b"1\n", b"1"),
        (b"1 \r\n2\n\n", b"1\n2"),
        (b"", b"\n \n"),
        (b"0.333333", b"0.3333333333"),
        (b"x 1.0 y", b"x  1 y"),
        (b"1e5", b"100000.0"),
        (b"-.5", b"-0.5"),
        (b"nan", b"nan"),
        (b"\xff\xfe", b"\xff\xfe"),
    ],
)
def test_texts_accepted(expected: bytes, got: bytes) -> None:
    assert same_text(expected, got)


@pytest.mark.parametrize(
    ("expected", "got"),
    [
        (b"1", b"1.0"),
        (b"1", b" 1"),
        (b"1\n2", b"1 2"),
        (b"1\n2", b"1\n\n2"),
        (b"1.5", b"1.5 1.5"),
        (b"1.5", b"nan"),
        (b"1.5", b"inf"),
        (b"1.5", b"1_5e-1"),
        (b"1.5", b"1.5\x00"),
        (b"1.5", b"9" * 100_000),
        (b"1e9999", b"1e999"),
        (b"\xc3\xa9", b"\xe9"),
        (b"a", b"A"),
        (b"1.2.3", b"1.2.30"),
    ],
)
def test_texts_refused(expected: bytes, got: bytes) -> None:
    assert not same_text(expected, got)
