"""Converts records (dataclasses, msgspec structs) by their type hints to plain JSON values or to
bytes, and back.

    to_plain(thing)         -> dict of numbers, texts, lists and dicts, in the order of the fields
    from_plain(cls, plain)  -> an equal thing, also if the dict was written as JSON
    Codec(types)            -> encodes values of these types as bytes, and decodes them

    hint                              plain form
    struct, dataclass                 dict by field name; a missing field has its default
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

The event log, checkpoints and fitted runs hold the plain form. When it is read, a struct's values
are checked against its hints, a dataclass's by the class itself. The converters of a class are made
once, since logs have millions of records.

Bytes are for messages between processes: MessagePack by msgspec, in which a value of a listed type
has the number of its type. Decoding checks every value against the hints, makes only values of the
listed types, and calls no function that the bytes name.
"""

from __future__ import annotations

import types
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import partial
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
import numpy as np

T = TypeVar("T")
Convert = Callable[[Any], Any]

OMIT_DEFAULT: Mapping[str, Any] = {"omit_default": True}
"""`metadata` for a dataclass's field that is left out of the plain form (JSON values) while it has
its default, so that older files without the field stay valid."""

Omitted = Annotated[T, "omit_default"]
"""Hint for a struct's field that is left out of the plain form (JSON values) while it has its
default."""


def absent(value: Any) -> Mapping[str, Any]:
    """Returns `metadata` for a dataclass's field that is left out of the plain form (JSON values)
    while it has this value. If the plain form lacks the field, it is read as this value, whatever
    its default is."""
    return {"absent": value}


class _Field(NamedTuple):
    name: str
    hint: Any
    left_out: Any
    """The field is left out of the plain form while it has this value; MISSING: never left out."""
    absent: Any
    """The value of a field that the plain form lacks; MISSING: its default."""


class _Form(NamedTuple):
    """How values of one class are converted to the plain form (JSON values) and back."""

    writers: tuple[tuple[str, Convert], ...]
    """Fields whose values must be converted for the plain form, each with the function for that."""
    left_out: tuple[tuple[str, Any], ...]
    """Fields left out of the plain form at a certain value, each with this value."""
    readers: tuple[tuple[str, Convert], ...]
    absent: Mapping[str, Any]
    """Values of fields that the plain form lacks, by field name. Fields that are not in here have
    their default."""
    names: tuple[str, ...]
    make: Callable[[dict[str, Any]], Any]
    """Makes a value of the class, given the values of its fields by name."""


_FORMS: dict[type, _Form] = {}

_MAPPINGS = (dict, Counter, Mapping)
_SEQUENCES = (list, deque, Sequence)


def to_plain(thing: Any) -> dict[str, Any]:
    """Returns a struct or a dataclass instance as a dict that JSON can hold."""
    form = _FORMS.get(type(thing)) or _add_form(type(thing))
    if isinstance(thing, msgspec.Struct):
        plain = msgspec.structs.asdict(thing)
    else:
        plain = {name: getattr(thing, name) for name in form.names}
    for name, value in form.left_out:
        if plain[name] == value:
            del plain[name]
    for name, convert in form.writers:
        if name in plain:
            plain[name] = convert(plain[name])
    return plain


def from_plain(cls: type[T], plain: Mapping[str, Any]) -> T:
    """Returns the instance of which `to_plain` made this dict. Raises `TypeError` or `ValueError`
    for an unknown field, a missing one without default, or a struct's value of a wrong type; and
    whatever the class raises for values that it refuses."""
    form = _FORMS.get(cls) or _add_form(cls)
    values = {**form.absent, **plain}
    for name, convert in form.readers:
        if name in values:
            values[name] = convert(values[name])
    made: T = form.make(values)
    return made


def part_of(cls: type[T], plain: Mapping[str, Any]) -> T:
    """Returns an instance of `cls`, as `from_plain` does, from the dict's entries that are fields
    of it."""
    names = (_FORMS.get(cls) or _add_form(cls)).names
    return from_plain(cls, {name: plain[name] for name in names if name in plain})


def _add_form(cls: type) -> _Form:
    found = _fields(cls)
    writers = [(field.name, _writer(field.hint)) for field in found]
    readers = [(field.name, _reader(field.hint)) for field in found]
    form = _FORMS[cls] = _Form(
        writers=tuple([(name, convert) for name, convert in writers if convert is not None]),
        left_out=tuple([(f.name, f.left_out) for f in found if f.left_out is not MISSING]),
        readers=tuple([(name, convert) for name, convert in readers if convert is not None]),
        absent={field.name: field.absent for field in found if field.absent is not MISSING},
        names=tuple([field.name for field in found]),
        make=partial(msgspec.convert, type=cls)
        if issubclass(cls, msgspec.Struct)
        else lambda values: cls(**values),
    )
    return form


def _fields(cls: type) -> list[_Field]:
    hints = get_type_hints(cls, include_extras=True)
    if issubclass(cls, msgspec.Struct):
        return [
            _Field(
                name=field.name,
                hint=_without_extras(hints[field.name]),
                left_out=field.default if _is_omitted(hints[field.name]) else MISSING,
                absent=MISSING,
            )
            for field in msgspec.structs.fields(cls)
        ]
    assert is_dataclass(cls), f"{cls} has no plain form"
    return [
        _Field(
            name=field.name,
            hint=hints[field.name],
            left_out=field.metadata.get(
                "absent", field.default if field.metadata.get("omit_default") else MISSING
            ),
            absent=field.metadata.get("absent", MISSING),
        )
        for field in fields(cls)
    ]


def _is_omitted(hint: Any) -> bool:
    return get_origin(hint) is Annotated and "omit_default" in hint.__metadata__


def _without_extras(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def named_by(hint: Any) -> Any:
    """Return the type that a type alias with arguments stands for, such as numpy's NDArray[...]
    since Python 3.12; another hint as it is."""
    value = getattr(get_origin(hint), "__value__", None)
    return hint if value is None else value[get_args(hint)]


def _writer(hint: Any) -> Convert | None:
    """Returns the function from a value with this type hint to its plain form (JSON values). None
    if the value is plain already."""
    hint = named_by(hint)
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
    if hasattr(hint, "parse"):
        return str
    if _is_record(hint):
        return to_plain
    if hasattr(hint, "_fields"):
        return _elements(tuple(get_type_hints(hint).values()), _writer, list)
    return _value_of if isinstance(hint, type) and issubclass(hint, Enum) else None


def _reader(hint: Any) -> Convert | None:
    """Returns a function from plain form to a value with this hint. None if they are the same."""
    hint = named_by(hint)
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
    if hasattr(hint, "parse"):
        return hint.parse  # type: ignore[no-any-return]  # a class method of ours
    if _is_record(hint):
        return partial(from_plain, hint)
    if hasattr(hint, "_fields"):
        read = _elements(tuple(get_type_hints(hint).values()), _reader, tuple)
        return lambda values: hint(*read(values))
    return hint if isinstance(hint, type) and issubclass(hint, Enum) else None


def _is_record(hint: Any) -> bool:
    return isinstance(hint, type) and (is_dataclass(hint) or issubclass(hint, msgspec.Struct))


def _is_union(origin: Any) -> bool:
    return origin is Union or origin is types.UnionType


def _optional(members: Sequence[Any], converter: Callable[[Any], Convert | None]) -> Convert | None:
    """Returns `converter`'s conversion of `X | None`. None if no hint in `members` needs one."""
    found = {id(c): c for c in map(converter, members) if c is not None}
    if not found:
        return None
    assert len(members) == 2 and type(None) in members, f"no plain form for a union {members}"
    (convert,) = found.values()
    return lambda value: None if value is None else convert(value)


def _elements(
    arguments: Sequence[Any], converter: Callable[[Any], Convert | None], make: Callable[..., Any]
) -> Convert:
    """Returns the conversion for a sequence. `arguments`: one type hint for all elements, or one
    each. `converter`: conversion for a hint. `make`: makes the sequence of a list of elements."""
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


# -- bytes -----------------------------------------------------------------------------

_TUPLE, _PAIRS, _BIG_INTEGER, _TEXT, _ARRAY = range(5)
_FIRST_TYPE = 16
"""First MessagePack extension code of the types listed in a `Codec`, numbered from here. Lower
codes are for values that MessagePack lacks, such as tuples."""
_DTYPES = ("int32", "int64", "uint8", "float32", "float64", "bool")
"""Names of the numpy dtypes that arrays in a message may have."""
_SIMPLE = frozenset((type(None), bool, float, str, bytes))
_MIN_INTEGER, _MAX_INTEGER = -(1 << 63), (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Kind:
    """How values of one type become bytes if its type hints do not say that: `to_plain` makes of a
    value one that a `Codec` can encode, and `from_plain` reverses that."""

    type: type
    to_plain: Callable[[Any], Any]
    from_plain: Callable[[Any], Any]


def by_field(of: type) -> Kind:
    """Returns a `Kind` that encodes a dataclass field by field, without checking its hints."""
    names = [field.name for field in _fields(of)]
    return Kind(
        of,
        lambda value: [getattr(value, name) for name in names],
        lambda values: of(**dict(zip(names, values, strict=True))),
    )


class Codec:
    """Encodes plain values, containers, numpy arrays and values of the listed types (structs,
    dataclasses, named tuples) as bytes, and decodes them; listed types are checked against their
    hints. Both sides list the same types in the same order. Values come back equal, floats bit for
    bit, except that in fields of a listed type without a hint tuples come back as lists."""

    def __init__(self, types: Sequence[type | Kind] = ()) -> None:
        self.types = tuple(types)
        self._codes: dict[type, int] = {}
        self._kinds: dict[int, Kind] = {}
        """The `Kind` of each type that was listed as a `Kind`, by the type's code in messages."""
        self._decoders: dict[int, msgspec.msgpack.Decoder[Any]] = {}
        """Decoders of the types that are encoded by their hints, by the type's code."""
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._ext)
        self._decoder = msgspec.msgpack.Decoder(ext_hook=self._from_ext)
        for code, one in enumerate(types, _FIRST_TYPE):
            if isinstance(one, Kind):
                self._codes[one.type], self._kinds[code] = code, one
            else:
                self._codes[one] = code
                self._decoders[code] = msgspec.msgpack.Decoder(
                    one, dec_hook=self._of_type, ext_hook=self._from_ext
                )
        assert len(self._codes) == len(types), "a type is listed twice"

    def encode(self, value: Any) -> bytes:
        """Returns the value as bytes. Raises `TypeError` for a type that is not listed, and
        `ValueError` if a listed type's value has a number or text that MessagePack cannot hold."""
        try:
            try:
                return self._encoder.encode(self._plain(value, _is_plain))
            except UnicodeEncodeError:  # half a character somewhere, which UTF-8 has not
                return self._encoder.encode(self._plain(value, _is_number))
        except OverflowError as error:
            raise ValueError(f"no message can hold it: {error}") from None

    def decode(self, data: bytes) -> Any:
        """Returns the value that `encode` was given. Raises `ValueError` for bytes that are no such
        message."""
        try:
            return self._decoder.decode(data)
        except (KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise ValueError(f"bytes that are no message: {error!r}") from None

    def _plain(self, value: Any, is_plain: Callable[[Collection[Any]], bool]) -> Any:
        """Returns the value in a form that MessagePack can hold. `is_plain`: returns whether all of
        the values it is given need no conversion (`_is_plain` or `_is_number`)."""
        kind = type(value)
        if kind is list or kind is tuple:
            plain = value if is_plain(value) else [self._plain(one, is_plain) for one in value]
            return plain if kind is list else self._made(_TUPLE, plain)
        # Another kind of dictionary would come back as a plain one, without its defaults.
        if kind is dict or (isinstance(value, Mapping) and not isinstance(value, dict)):
            if is_plain(value):
                return {key: self._plain(one, is_plain) for key, one in value.items()}
            return self._made(_PAIRS, self._plain([[*pair] for pair in value.items()], is_plain))
        if is_plain((value,)):
            return value
        if kind is int:
            return msgspec.msgpack.Ext(_BIG_INTEGER, str(value).encode())
        if kind is str:
            return msgspec.msgpack.Ext(_TEXT, value.encode("utf-8", "surrogatepass"))
        return self._ext(value, is_plain)

    def _ext(
        self, value: Any, is_plain: Callable[[Collection[Any]], bool] | None = None
    ) -> msgspec.msgpack.Ext:
        """Returns the MessagePack extension for an array or a value of a listed type. Raises
        `TypeError` for any other value."""
        if isinstance(value, np.ndarray):
            if value.dtype.name not in _DTYPES:
                raise TypeError(f"no message can hold an array of {value.dtype}")
            return self._made(_ARRAY, (value.dtype.name, value.shape, value.tobytes()))
        code = self._codes.get(type(value))
        if code is None:
            raise TypeError(f"no message can hold a {type(value).__qualname__}")
        if code in self._kinds:
            value = self._plain(self._kinds[code].to_plain(value), is_plain or _is_plain)
        return self._made(code, value)

    def _made(self, code: int, plain: Any) -> msgspec.msgpack.Ext:
        return msgspec.msgpack.Ext(code, self._encoder.encode(plain))

    def _from_ext(self, code: int, data: memoryview) -> Any:
        if code in self._decoders:
            return self._decoders[code].decode(data)
        if code == _ARRAY:
            return _array_of(*self._decoder.decode(data))
        if code == _TUPLE:
            return tuple(self._decoder.decode(data))
        if code == _PAIRS:
            return dict(self._decoder.decode(data))
        if code == _BIG_INTEGER:
            return int(bytes(data))
        if code == _TEXT:
            return bytes(data).decode("utf-8", "surrogatepass")
        return self._kinds[code].from_plain(self._decoder.decode(data))

    def _of_type(self, hint: Any, value: Any) -> Any:
        """Returns `value` if it is of the type that `hint` names; else raises `TypeError`. Called
        for fields of listed types."""
        origin = get_origin(named_by(hint)) or hint
        if not isinstance(value, origin):
            raise TypeError(f"{type(value).__qualname__} instead of {hint}")
        return value


def _is_plain(values: Collection[Any]) -> bool:
    """Whether MessagePack can hold all of these values without a conversion."""
    kinds = set(map(type, values))
    if int in kinds:
        kinds.remove(int)
        return not kinds and _is_small(values)
    return kinds <= _SIMPLE


def _is_number(values: Collection[Any]) -> bool:
    """Whether MessagePack can hold all of these values without a conversion, and none is a text."""
    return _is_plain(values) and not any(type(one) is str for one in values)


def _is_small(numbers: Collection[int]) -> bool:
    return min(numbers) >= _MIN_INTEGER and max(numbers) <= _MAX_INTEGER


def _array_of(name: str, shape: Sequence[int], data: bytes) -> np.ndarray[Any, Any]:
    if name not in _DTYPES:
        raise ValueError(f"an array of {name}")
    return np.frombuffer(data, name).reshape(shape)
