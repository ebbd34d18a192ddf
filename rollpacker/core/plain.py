"""Dataclasses to plain JSON values and back, by their type hints.

    to_plain(thing)         -> dict of numbers, texts, lists and dicts, in the order of the fields
    from_plain(cls, plain)  -> an equal thing, also after a turn through JSON

    hint                              plain form
    dataclass                         dict by field name; a missing field has its default
    class with `parse` (ids)          text
    other NamedTuple                  list
    enum                              its value
    tuple, list, Sequence, deque      list
    dict, Mapping with text keys      dict
    ... with whole numbers as keys    dict, keys as text: JSON has no others
    ... with other keys               list of [key, value]
    ... with values None              list of the keys: an ordered set
    numpy array                       nested lists
    numbers, texts, None, Any         as they are

The event log, configurations in it, what checkpoints hold and fitted runs are all written by this
one codec. It does not check values: what is read was written by it, and the classes' own checks
run. A class's converters are made once, since logs have millions of records.
"""

from __future__ import annotations

import types
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import partial
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

T = TypeVar("T")
Convert = Callable[[Any], Any]

OMIT_DEFAULT: Mapping[str, Any] = {"omit_default": True}
"""`metadata` of a field that is left out of the plain form while it has its default: what was
written before the field existed stays as it was."""


def absent(value: Any) -> Mapping[str, Any]:
    """`metadata` of a field that is left out of the plain form while it has this value, and has it
    where the plain form lacks it: what held before the field existed, whatever its default is."""
    return {"absent": value}


_Writers = tuple[tuple[str, Convert | None, Any], ...]
_WRITERS: dict[type, _Writers] = {}
"""By class, for every field: its name, its converter, and the default to leave out or MISSING."""
_Readers = tuple[tuple[str, Convert], ...]
_READERS: dict[type, _Readers] = {}
"""By class: the fields that need a converter, with it."""

_ABSENT: dict[type, dict[str, Any]] = {}
"""By class: values of fields that the plain form lacks, where that is not the default."""

_MAPPINGS = (dict, Counter, Mapping)
_SEQUENCES = (list, deque, Sequence)


def to_plain(thing: Any, head: dict[str, Any] | None = None) -> dict[str, Any]:
    """A dataclass instance as a dict that JSON can hold; added to `head`, if that is given."""
    plain: dict[str, Any] = {} if head is None else head
    for name, convert, left_out in _WRITERS.get(type(thing)) or _add_writers(type(thing)):
        value = getattr(thing, name)
        if left_out is not MISSING and value == left_out:
            continue
        plain[name] = value if convert is None else convert(value)
    return plain


def from_plain(cls: type[T], plain: Mapping[str, Any]) -> T:
    """The dataclass instance that `to_plain` was given. Raises `TypeError` for an unknown field or
    a missing one without default, and what the class raises for values that it refuses."""
    readers = _READERS.get(cls)
    if readers is None:
        readers = _add_readers(cls)
    values = {**_ABSENT[cls], **plain}
    for name, convert in readers:
        if name in values:
            values[name] = convert(values[name])
    return cls(**values)


def part_of(cls: type[T], plain: Mapping[str, Any]) -> T:
    """`from_plain` of the entries that are fields of `cls`, in a mapping that has others too."""
    return from_plain(cls, {f.name: plain[f.name] for f in _fields(cls) if f.name in plain})


def _fields(cls: type) -> tuple[Field[Any], ...]:
    assert is_dataclass(cls), f"{cls} has no plain form"
    return fields(cls)


def _add_writers(cls: type) -> _Writers:
    hints = get_type_hints(cls)
    _WRITERS[cls] = found = tuple(
        (f.name, _writer(hints[f.name]), _left_out(f)) for f in _fields(cls)
    )
    return found


def _left_out(field: Field[Any]) -> Any:
    """The value with which the field is left out, or MISSING."""
    default = field.default if field.metadata.get("omit_default") else MISSING
    return field.metadata.get("absent", default)


def _add_readers(cls: type) -> _Readers:
    readers = ((name, _reader(hint)) for name, hint in get_type_hints(cls).items())
    _READERS[cls] = found = tuple([(name, read) for name, read in readers if read is not None])
    _ABSENT[cls] = {f.name: f.metadata["absent"] for f in _fields(cls) if "absent" in f.metadata}
    return found


def _writer(hint: Any) -> Convert | None:
    """From a value with this hint to its plain form; None: it is plain already."""
    origin, arguments = get_origin(hint), get_args(hint)
    if _is_union(origin):
        return _optional(arguments, _writer)
    if origin is Literal:
        return None
    if origin is np.ndarray:
        return _array_to_lists
    if origin is tuple or origin in _SEQUENCES:
        return _elements(arguments, _writer, list)
    if origin in _MAPPINGS:
        if arguments[-1] is None:
            key = _writer(arguments[0])
            return list if key is None else lambda values: [key(value) for value in values]
        return _mapping_writer(*arguments) if len(arguments) == 2 else dict  # a Counter has one
    if is_dataclass(hint):
        return to_plain
    if hasattr(hint, "parse"):
        return str
    if hasattr(hint, "_fields"):
        return _elements(tuple(get_type_hints(hint).values()), _writer, list)
    return _value_of if isinstance(hint, type) and issubclass(hint, Enum) else None


def _reader(hint: Any) -> Convert | None:
    """From the plain form to a value with this hint; None: it is the same."""
    origin, arguments = get_origin(hint), get_args(hint)
    if _is_union(origin):
        return _optional(arguments, _reader)
    if origin is Literal:
        return None
    if origin is np.ndarray:
        return partial(np.array, dtype=get_args(arguments[1])[0])
    if origin is tuple or origin in _SEQUENCES:
        make = origin if origin in (tuple, deque) else list
        return _elements(arguments, _reader, make)
    if origin in _MAPPINGS:
        if arguments[-1] is None:
            key = _reader(arguments[0])
            return dict.fromkeys if key is None else lambda values: dict.fromkeys(map(key, values))
        return _mapping_reader(*arguments) if len(arguments) == 2 else Counter
    if isinstance(hint, type) and is_dataclass(hint):
        return partial(from_plain, hint)
    if hasattr(hint, "parse"):
        return hint.parse  # type: ignore[no-any-return]  # a class method of ours
    if hasattr(hint, "_fields"):
        read = _elements(tuple(get_type_hints(hint).values()), _reader, tuple)
        return lambda values: hint(*read(values))
    return hint if isinstance(hint, type) and issubclass(hint, Enum) else None


def _is_union(origin: Any) -> bool:
    return origin is Union or origin is types.UnionType


def _optional(members: Sequence[Any], converter: Callable[[Any], Convert | None]) -> Convert | None:
    """Of `X | None`, or of a union whose members are all plain."""
    found = {id(c): c for c in map(converter, members) if c is not None}
    if not found:
        return None
    assert len(members) == 2 and type(None) in members, f"no plain form for a union {members}"
    (convert,) = found.values()
    return lambda value: None if value is None else convert(value)


def _elements(
    arguments: Sequence[Any], converter: Callable[[Any], Convert | None], make: Callable[..., Any]
) -> Convert:
    """Of a sequence: all elements alike, or one hint for each (a tuple of fixed length)."""
    if len(arguments) == 1 or arguments[-1] is Ellipsis:
        convert = converter(arguments[0])
        if convert is None:
            return make
        return lambda values: make([convert(value) for value in values])
    converts = [converter(argument) or _same for argument in arguments]
    if all(convert is _same for convert in converts):
        return make
    return lambda values: make(
        [convert(value) for convert, value in zip(converts, values, strict=True)]
    )


def _mapping_writer(key_hint: Any, value_hint: Any) -> Convert:
    value = _writer(value_hint)
    if key_hint is str and value is None:
        return dict
    value = value or _same
    if key_hint is str or key_hint is int:
        return lambda items: {str(k): value(v) for k, v in items.items()}
    key = _writer(key_hint) or _same
    return lambda items: [[key(k), value(v)] for k, v in items.items()]


def _mapping_reader(key_hint: Any, value_hint: Any) -> Convert:
    value = _reader(value_hint)
    if key_hint is str and value is None:
        return dict
    value = value or _same
    if key_hint is str or key_hint is int:
        return lambda items: {key_hint(k): value(v) for k, v in items.items()}
    key = _reader(key_hint) or _same
    return lambda pairs: {key(k): value(v) for k, v in pairs}


def _same(value: Any) -> Any:
    return value


def _value_of(member: Enum) -> Any:
    return member.value


def _array_to_lists(array: np.ndarray[Any, Any]) -> list[Any]:
    lists: list[Any] = array.tolist()
    return lists
