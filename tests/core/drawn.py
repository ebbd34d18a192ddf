"""Values for a type's hints, drawn by hypothesis: any that the codec may meet."""

from __future__ import annotations

import types
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
from hypothesis import strategies as st

from rollpacker.codec import named_by
from rollpacker.core.ids import PromptId, SampleId

TEXTS = st.text(max_size=6)
FLOATS = st.floats(allow_nan=False)
NUMBERS = st.integers(-(2**31), 2**31 - 1)
PROMPTS = st.builds(
    PromptId, st.sampled_from(["gsm8k", "a/b", "ä#1.2"]), st.integers(0, 3), st.integers(0, 99)
)
SAMPLES = st.builds(SampleId, PROMPTS, st.integers(0, 9), st.integers(0, 3))
_PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    Any: st.none() | st.booleans() | NUMBERS | FLOATS | TEXTS,
    None: st.none(),
    type(None): st.none(),
    bool: st.booleans(),
    int: NUMBERS,
    float: FLOATS,
    str: TEXTS,
    bytes: st.binary(max_size=6),
    PromptId: PROMPTS,
    SampleId: SAMPLES,
}


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Any value with this hint. A class that refuses some values has those that it takes."""
    hint = named_by(hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in _PLAIN:
        return _PLAIN[hint]
    if origin is Annotated:
        return values(arguments[0])
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (Union, types.UnionType):
        return st.one_of([values(one) for one in arguments])
    if origin is tuple and arguments[-1:] != (Ellipsis,):
        return st.tuples(*map(values, arguments))
    if origin in (tuple, list, deque, Sequence):
        made = origin if origin in (tuple, deque) else list
        return st.lists(values(arguments[0]), max_size=3).map(made)
    if origin in (dict, Mapping):
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=3)
    if origin is Counter:
        return st.dictionaries(values(arguments[0]), st.integers(1, 99), max_size=3).map(Counter)
    if origin is np.ndarray:
        dtype = get_args(arguments[1])[0]
        dtype = {np.integer: np.int64, np.floating: np.float32}.get(dtype, dtype)
        return st.lists(st.integers(0, 99), max_size=4).map(lambda found: np.array(found, dtype))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(hint)
    assert isinstance(hint, type), f"no values for {hint}"
    assert is_dataclass(hint) or issubclass(hint, tuple | msgspec.Struct), f"no values for {hint}"
    hints = get_type_hints(hint, include_extras=True)
    return st.fixed_dictionaries({name: values(one) for name, one in hints.items()}).map(
        lambda fields: hint(**fields)
    )
