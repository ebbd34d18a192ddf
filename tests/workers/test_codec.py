"""Values as bytes, and back; and what bytes cannot do."""

import json
import math
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rollpacker.workers.codec import Codec, Kind


class Id(NamedTuple):
    name: str
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    id: Id
    tokens: tuple[int, ...]
    weights: list[float] | None = None


CODEC = Codec(Id, Sample, Kind(Counter, dict, Counter), Kind(type(Path()), str, Path))
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


def test_what_is_not_listed_is_no_message() -> None:
    with pytest.raises(TypeError, match="no message can hold a function"):
        CODEC.encode({"a": [print.__class__, lambda: 1]}["a"][1])


def bytes_of(plain: Any, rows: bytes = b"") -> bytes:
    text = json.dumps(plain).encode()
    return struct.pack(">Q", len(text)) + text + rows


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04cos\nsystem\n(S'touch pwned'\ntR.",
        struct.pack(">Q", 1 << 60) + b"[]",
        bytes_of(["os.system", ["list", "touch pwned"]]),
        bytes_of(["Sample", ["list", 1]]),
        bytes_of(["Sample", {"id": 1}]),
        bytes_of(["Id", None]),
        bytes_of([]),
        bytes_of(["bytes", -1]),
        bytes_of(["bytes", 10], b"short"),
        bytes_of(["q", "list", 1 << 40], b"short"),
        bytes_of(["q", "set", 1], bytes(8)),
        bytes_of(["map", 1]),
        struct.pack(">Q", 40_000) + b"[" * 40_000,
    ],
)
def test_bytes_that_are_no_message_make_nothing(data: bytes) -> None:
    with pytest.raises(ValueError):
        CODEC.decode(data)
