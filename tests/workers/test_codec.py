"""Values as bytes, and back; and what bytes cannot do."""

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from rollpacker.codec import Codec, Kind, by_field


class Id(NamedTuple):
    name: str
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    id: Id
    tokens: tuple[int, ...]
    weights: list[float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """What its hints do not say comes back as it was, where each field is written by itself."""

    anything: Any
    number: int = 0


class Rows(msgspec.Struct, frozen=True, eq=False):
    rows: NDArray[np.float32] | None


BY_HAND = [Kind(Counter, dict, Counter), Kind(type(Path()), str, Path)]
CODEC = Codec([Id, Sample, *BY_HAND, Rows, by_field(Free)])
TINY = [5e-324, 1e308, -0.0, 0.1, 1 / 3, math.inf, -math.inf]


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        2**80,
        "\ud7ff\U0001f600\u2028\0",
        b"\x00\xff",
        (),
        [],
        {},
        ((1, 2), [3.5, "x"], None),
        {"a": 1, 2: "b", Id("x", 1): [b"", b"y"]},
        tuple(range(-500, 500)),
        [2**63 - 1] * 20,
        [2**63] * 20,
        [True] * 20,
        [1, 2.0] * 20,
        tuple(TINY * 20),
        TINY,
        Sample(id=Id("rows/1", 3), tokens=tuple(range(100)), weights=[0.25] * 100),
        (Sample(id=Id("", 0), tokens=()), Counter(a=2.5), Path("/a/b")),
        {"a": [Free(anything=((1, [2**70]), Id("x", 1)))]},
        {(1, ("a", 2)): 3},
        -(2**63),
        2**64 - 1,
        [2**64],
        [1, True, 0.5, "x"],
        ["\ud800", ("\udfff", 1), {"\ud800": b""}],
        Free(anything="\ud800"),
    ],
)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    found = CODEC.decode(CODEC.encode(value))
    assert found == value
    assert repr(found) == repr(value), "types, and the sign of zero"


def test_numbers_that_are_none_come_back() -> None:
    found = CODEC.decode(CODEC.encode([math.nan] * 20 + [1.0]))
    assert all(map(math.isnan, found[:20])) and found[20] == 1.0
    assert math.isnan(CODEC.decode(CODEC.encode(math.nan)))


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "float32", "float64", "bool"])
@pytest.mark.parametrize("shape", [(0,), (3,), (2, 3), ()])
def test_an_array_comes_back_as_it_was(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    (found,) = CODEC.decode(CODEC.encode([array]))
    assert found.dtype == array.dtype and found.shape == array.shape
    assert (found == array).all()
    inside = CODEC.decode(CODEC.encode(Rows(rows=array))).rows
    assert inside.tobytes() == array.tobytes() and inside.shape == array.shape
    assert CODEC.decode(CODEC.encode(Rows(rows=None))).rows is None


def test_an_array_of_objects_is_no_message() -> None:
    with pytest.raises(TypeError, match="an array of object"):
        CODEC.encode(np.array([print]))


def test_a_number_that_a_listed_type_cannot_hold_is_an_error() -> None:
    with pytest.raises(ValueError, match="no message can hold it"):
        CODEC.encode(Sample(id=Id("x", 2**70), tokens=()))


def test_what_is_not_listed_is_no_message() -> None:
    with pytest.raises(TypeError, match="no message can hold a function"):
        CODEC.encode({"a": [print.__class__, lambda: 1]}["a"][1])


def ext(code: int, value: Any) -> bytes:
    data = value if isinstance(value, bytes) else msgspec.msgpack.encode(value)
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(code, data))


TUPLE, PAIRS, BIG, TEXT, ARRAY, ID, SAMPLE, COUNTER, ROWS = *range(5), 16, 17, 18, 20


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04cos\nsystem\n(S'touch pwned'\ntR.",
        b"\xdd\xff\xff\xff\xff",  # 4 billion elements, of which none is there
        b"\xc6\xff\xff\xff\xffshort",
        b"\x91" * 40_000,
        ext(99, ["touch pwned"]),
        ext(TUPLE, 1),
        ext(TUPLE, b"\xdd\xff\xff\xff\xff"),
        ext(BIG, b"os.system"),
        ext(BIG, b"9" * 100_000),
        ext(TEXT, b"\xff"),
        ext(PAIRS, [1]),
        ext(PAIRS, [[[], 1]]),
        ext(ARRAY, ["object", [1], bytes(8)]),
        ext(ARRAY, ["int64", [1 << 40], b"short"]),
        ext(ARRAY, ["int64", [2], bytes(8)]),
        ext(ARRAY, ["int64", "x"]),
        ext(ID, None),
        ext(ID, ["x"]),
        ext(ID, ["x", "1"]),
        ext(SAMPLE, [1]),
        ext(SAMPLE, {"id": 1}),
        ext(SAMPLE, {"id": ["x", 1], "tokens": ["1"]}),
        ext(COUNTER, 1),
        ext(ROWS, {"rows": "x"}),
        ext(ROWS, {"rows": [1.0]}),
    ],
)
def test_bytes_that_are_no_message_make_nothing(data: bytes) -> None:
    with pytest.raises(ValueError):
        CODEC.decode(data)
