"""The codec: every kind of hint there and back, through JSON."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from rollpacker.codec import OMIT_DEFAULT, from_plain, part_of, to_plain
from rollpacker.core.ids import PromptId, SampleId


class Colour(StrEnum):
    RED = "red"


class Pair(NamedTuple):
    prompt: PromptId
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    degree: int
    limit: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    name: str
    colour: Colour
    factor: float | Literal["auto"]
    inner: Inner | None
    inners: Mapping[str, Inner]
    groups: tuple[tuple[SampleId, ...], ...]
    window: tuple[float, float]
    pairs: Sequence[Pair]
    waiting: deque[tuple[PromptId, int]]
    by_degree: Mapping[int, float]
    by_share: Mapping[float, int]
    by_prompt: dict[PromptId, tuple[int, ...]]
    in_order: dict[PromptId, None]
    counts: Counter[str]
    anything: Mapping[str, Any]
    later: tuple[str, ...] = field(default=(), metadata=OMIT_DEFAULT)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrays:
    matrix: NDArray[np.float64]
    row: NDArray[np.int64] | None


ONE, TWO = PromptId("a/b", 0, 1), PromptId("a/b", 0, 2)
OUTER = Outer(
    name="n",
    colour=Colour.RED,
    factor="auto",
    inner=Inner(degree=2),
    inners={"x": Inner(degree=1, limit=0.5)},
    groups=((SampleId(ONE, 0, 1), SampleId(ONE, 2, 1)), ()),
    window=(0.25, 0.5),
    pairs=[Pair(ONE, (3, 4))],
    waiting=deque([(TWO, 1)]),
    by_degree={4: 0.5, 2: 0.25},
    by_share={0.5: 7},
    by_prompt={TWO: (1, 2)},
    in_order={TWO: None, ONE: None},
    counts=Counter({"b": 1, "a": 2}),
    anything={"free": [1, None]},
)


def test_every_kind_of_hint_survives_json() -> None:
    plain = to_plain(OUTER)
    assert list(plain) == [name for name in Outer.__dataclass_fields__ if name != "later"]
    assert plain["groups"] == [["a/b/0/1#1.0", "a/b/0/1#1.2"], []]
    assert plain["by_degree"] == {"4": 0.5, "2": 0.25}  # JSON has no numbers as keys
    assert plain["by_share"] == [[0.5, 7]]
    assert plain["in_order"] == ["a/b/0/2", "a/b/0/1"]
    assert plain["pairs"] == [["a/b/0/1", [3, 4]]]
    again = from_plain(Outer, json.loads(json.dumps(plain)))
    assert again == OUTER
    assert isinstance(again.waiting, deque) and isinstance(again.counts, Counter)
    assert list(again.in_order) == [TWO, ONE]


def test_a_default_is_left_out_where_the_field_says_so() -> None:
    said = from_plain(Outer, to_plain(OUTER) | {"later": ["x"]})
    assert said.later == ("x",) and to_plain(said)["later"] == ["x"]
    assert "later" not in to_plain(OUTER)


def test_arrays_survive_json() -> None:
    arrays = Arrays(matrix=np.array([[0.1, 1 / 3]]), row=None)
    again = from_plain(Arrays, json.loads(json.dumps(to_plain(arrays))))
    assert again.row is None and (again.matrix == arrays.matrix).all()
    assert again.matrix.dtype == np.float64 and again.matrix.shape == (1, 2)


def test_a_part_of_a_mapping_may_be_read() -> None:
    assert part_of(Inner, {"degree": 3, "unknown": 2}) == Inner(degree=3)


def test_an_unknown_field_is_an_error() -> None:
    with pytest.raises(TypeError, match="unknown"):
        from_plain(Inner, {"degree": 1, "unknown": 2})
    with pytest.raises(TypeError, match="degree"):
        from_plain(Inner, {})
