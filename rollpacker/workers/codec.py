"""Values as bytes that cannot execute: JSON, with long rows of numbers and bytes after it as they
are.

Plain values, lists, tuples, mappings, and dataclasses and named tuples of listed types come back
equal, floats bit for bit. Decoding makes nothing but these; it calls no function that the bytes
name.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from array import array
from collections.abc import Callable, Mapping
from typing import Any

_LENGTH = struct.Struct(">Q")
_ROW = 16
"""Rows of this many numbers or more are packed: JSON takes more than ten times as long for them."""
_ROWS = {int: "q", float: "d"}
_LISTS: dict[str, type] = {"list": list, "tuple": tuple}
_SIMPLE = frozenset((type(None), bool, int, float, str))
"""Types that JSON has. They are told apart where their list is written or read: a call for each of
them would take most of the time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """How to write a type that is neither plain nor a dataclass nor a named tuple as one that
    is."""

    type: type
    to_plain: Callable[[Any], Any]
    from_plain: Callable[[Any], Any]


class Codec:
    """Encodes and decodes plain values and values of the listed types. Both sides list the same."""

    def __init__(self, *types: type | Kind) -> None:
        kinds = [one if isinstance(one, Kind) else _kind(one) for one in types]
        self._by_type = {kind.type: kind for kind in kinds}
        self._by_name = {kind.type.__name__: kind for kind in kinds}
        assert len(self._by_name) == len(kinds), "two types of one name"

    def encode(self, value: Any) -> bytes:
        """Write a value. Raises `TypeError` for a value of a type that is not listed."""
        rows: list[bytes] = []
        text = json.dumps(self._plain(value, rows)).encode()
        return b"".join((_LENGTH.pack(len(text)), text, *rows))

    def decode(self, data: bytes) -> Any:
        """Read a value. Raises `ValueError` for bytes that `encode` cannot have made."""
        try:
            (length,) = _LENGTH.unpack_from(data)
            rows = memoryview(data)[_LENGTH.size :]
            return self._value(json.loads(bytes(rows[:length])), _Rows(rows[length:]))
        except (KeyError, TypeError, IndexError, struct.error, RecursionError) as error:
            raise ValueError(f"bytes that are no message: {error!r}") from None

    def _plain(self, value: Any, rows: list[bytes]) -> Any:
        if type(value) in _SIMPLE:
            return value
        if (kind := self._by_type.get(type(value))) is not None:
            return [kind.type.__name__, self._plain(kind.to_plain(value), rows)]
        if type(value) is bytes:
            rows.append(value)
            return ["bytes", len(value)]
        if type(value) in (list, tuple):
            if (row := _packed(value)) is not None:
                rows.append(row[1])
                return [row[0], type(value).__name__, len(value)]
            return [
                type(value).__name__,
                *[one if type(one) in _SIMPLE else self._plain(one, rows) for one in value],
            ]
        # Another kind of dictionary would come back as a plain one, without its defaults.
        if isinstance(value, Mapping) and not (isinstance(value, dict) and type(value) is not dict):
            items = value.items()
            return ["map", *([self._plain(k, rows), self._plain(v, rows)] for k, v in items)]
        raise TypeError(f"no message can hold a {type(value).__qualname__}")

    def _value(self, plain: Any, rows: _Rows) -> Any:
        if type(plain) is not list:
            return plain
        name, *rest = plain
        if (made := _LISTS.get(name)) is not None:
            return made([self._value(one, rows) if type(one) is list else one for one in rest])
        if name == "map":
            return {self._value(key, rows): self._value(value, rows) for key, value in rest}
        if name == "bytes":
            return bytes(rows.take(rest[0]))
        if name in _ROWS.values():
            numbers = array(name)
            numbers.frombytes(rows.take(rest[1] * numbers.itemsize))
            return _LISTS[rest[0]](numbers)
        return self._by_name[name].from_plain(self._value(rest[0], rows))


class _Rows:
    """The bytes after the JSON, which are taken from the front in the order of the rows."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def take(self, size: int) -> memoryview:
        if not 0 <= size <= len(self._data):
            raise IndexError(f"{size} bytes of {len(self._data)}")
        taken, self._data = self._data[:size], self._data[size:]
        return taken


def _packed(values: list[Any] | tuple[Any, ...]) -> tuple[str, bytes] | None:
    """Return the code and the bytes of a row that is long and has numbers of one type only."""
    if len(values) < _ROW or len(types := set(map(type, values))) > 1:
        return None
    code = _ROWS.get(types.pop())
    try:
        return None if code is None else (code, array(code, values).tobytes())
    except OverflowError:  # integers of more than 64 bits
        return None


def _kind(of: type) -> Kind:
    if dataclasses.is_dataclass(of):
        names = [field.name for field in dataclasses.fields(of)]
        return Kind(
            of,
            lambda value: [getattr(value, name) for name in names],
            lambda fields: of(**dict(zip(names, fields, strict=True))),
        )
    assert issubclass(of, tuple), f"{of} needs a Kind"
    return Kind(of, list, lambda fields: of(*fields))
