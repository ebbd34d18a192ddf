"""Makes a config's dataclasses of plain values: every key must be known, every value of its type.
The schema is walked and msgspec (strict) is asked about each leaf, so that all problems of a file
are found in one go and each names its key, its value, and what is allowed."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import types
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

import msgspec

from rollpacker.config.document import Path_, dotted, nearest
from rollpacker.config.earlier import GONE
from rollpacker.config.fields import (
    field_types,
    item_kind,
    item_schema,
    members,
    nested_schema,
)
from rollpacker.config.synonyms import (
    TRL,
    Synonym,
    all_keys,
    elsewhere,
    hint,
    of_others,
    of_value,
    said,
)

_FAILED = object()
_DOTTED_NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)*")


def allowed(kind: Any) -> str:
    """Words, used in messages, for the values that a type allows, such as `a number or null`."""
    parts = members(kind)
    choices = [c for m in parts if get_origin(m) is Literal for c in get_args(m)]
    words = [_WORDS.get(m) or _container_words(m) for m in parts if get_origin(m) is not Literal]
    if choices:
        quoted = ", ".join(f'"{c}"' for c in choices)
        words.append(f"one of {quoted}" if len(choices) > 1 else quoted)
    if "null" in words:
        words.remove("null")
        words.append("null")
    return " or ".join(words)


_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    types.NoneType: "null",
}


def _container_words(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Mapping and arguments[0] in (float, int):
        return f"a mapping (each key {_WORDS[arguments[0]]}, each value {allowed(arguments[1])})"
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return f"a list (each item {allowed(arguments[0])})"
        return f"a list of {len(arguments)} (each {allowed(arguments[0])})"
    return "a mapping"


class Checker:
    """Builds a config (an instance of a dataclass, its schema) from plain values, and lists all
    that is wrong with them in `problems`."""

    def __init__(self, raw: Mapping[Path_, str]) -> None:
        self.problems: list[tuple[Path_, str]] = []
        self._root: type = object
        """Schema (dataclass) of the whole config."""
        self.names_trl = False
        """Whether an unknown key or value was found that the framework TRL has."""
        self._raw = raw
        """Texts that the user typed as values of overrides, by path of the key. A field that takes
        a text gets this one if YAML has made something else of it."""

    def build(self, schema: type, value: Any, path: Path_) -> Any:
        """Returns an instance of the dataclass `schema`, made of the mapping `value` at `path` in
        the config. If `value` is wrong, adds to `problems` and returns the sentinel `_FAILED`."""
        if not isinstance(value, Mapping):
            keys = ", ".join(field_types(schema))
            return self._refuse(
                path, f"is {_show(value)}. Allowed: a mapping with keys such as {keys}"
            )
        hints = field_types(schema)
        if not path:
            self._root = schema
        for key in value:
            if key not in hints:
                self._refuse_unknown((*path, key), value[key], hints)
        arguments: dict[str, Any] = {}
        complete = all(key in hints for key in value)
        for field in dataclasses.fields(schema):
            if field.name in value:
                kind = hints[field.name]
                arguments[field.name] = self._field(kind, value[field.name], (*path, field.name))
                complete = complete and arguments[field.name] is not _FAILED
            elif _required(field):
                self._refuse(
                    (*path, field.name), f"is not set. Allowed: {allowed_value(hints[field.name])}"
                )
                complete = False
        if not complete:
            return _FAILED
        try:
            return schema(**arguments)
        except ValueError as error:
            return self._refuse_whole(path, hints, str(error))

    def _field(self, kind: Any, value: Any, path: Path_) -> Any:
        if value is None and types.NoneType in members(kind):
            return None
        if value == "???":
            return self._refuse(path, f"is not set. Allowed: {allowed_value(kind)}")
        schema = nested_schema(kind)
        if schema is not None and (isinstance(value, Mapping) or not _may_be_text(kind)):
            return self.build(schema, value, path)
        schema = item_schema(kind)
        if schema is not None:
            if not isinstance(value, list):
                problem = f"is {_show(value)}. Allowed: {allowed_value(kind)}"
                if theirs := self._of_value(path, value):
                    problem += f".{theirs}"
                elif isinstance(value, str) and _may_be_text(item_kind(kind)):
                    problem += f" (in brackets: [{value}])"
                return self._refuse(path, problem)
            items = [self._item(kind, schema, v, (*path, i)) for i, v in enumerate(value)]
            return _FAILED if any(item is _FAILED for item in items) else tuple(items)
        return self._leaf(kind, value, path)

    def _item(self, kind: Any, schema: type, value: Any, path: Path_) -> Any:
        """Builds the dataclass of a list's item from a mapping, or checks a text that the list's
        type `kind` allows in place of a mapping."""
        item = item_kind(kind)
        if isinstance(value, Mapping) or not _may_be_text(item):
            return self.build(schema, value, path)
        return self._leaf(item, value, path)

    def _leaf(self, kind: Any, value: Any, path: Path_) -> Any:
        unprintable = _unprintable(value)
        if unprintable:
            return self._refuse(path, f"holds {unprintable}")
        candidates = [_prepared(kind, value)]
        if path in self._raw and str in members(kind) and value is not None:
            candidates.append(self._raw[path])
        for candidate in candidates:
            try:
                return _converted(candidate, kind)
            except msgspec.ValidationError:
                continue
        problem = f"is {_show(value)}. Allowed: {allowed(kind)}"
        choices = [str(c) for m in members(kind) if get_origin(m) is Literal for c in get_args(m)]
        if isinstance(value, str) and choices:
            problem += f".{self._of_value(path, value) or nearest(value, choices)}"
        elif isinstance(value, Mapping) and any(":" in str(k) for k in value):
            problem += " (in {key: value} a space comes after the colon)"
        elif str in members(kind) and isinstance(value, int | float):
            problem += " (put it in quotes)"
        return self._refuse(path, problem)

    def _refuse_unknown(self, path: Path_, value: Any, siblings: Mapping[str, Any]) -> None:
        """Add an unknown key at `path` to `problems`, with a hint: what to write for a key of other
        frameworks, also in a section that only they have, or the nearest of the keys `siblings`."""
        if gone := GONE.get(dotted(path)):
            self._refuse(path, f"is no known key. {gone}")
            return
        known = tuple(all_keys(self._root))
        if isinstance(value, Mapping):
            inside = [((*path, *leaf), item) for leaf, item in _leaves_of(value)]
            hints = [
                (leaf, found) for leaf, item in inside if (found := of_others(leaf, known, item))
            ]
            for leaf, found in hints:
                self._note(found)
                self._refuse(leaf, f"is no known key.{said(found)}")
            if not hints and not nearest(str(path[-1]), siblings):
                for leaf, _ in inside:
                    if places := elsewhere(str(leaf[-1]), known):
                        self._refuse(leaf, f"is no known key.{places}")
                        hints.append((leaf, []))
            if hints:
                return
        self._note(of_others(path, known, value))
        told = hint(path, known, value) or nearest(str(path[-1]), siblings)
        self._refuse(path, f"is no known key.{told}")

    def _of_value(self, path: Path_, value: Any) -> str:
        found = of_value(path, tuple(all_keys(self._root)), value)
        self._note(found)
        return said(found)

    def _note(self, found: list[Synonym]) -> None:
        self.names_trl = self.names_trl or any(one.framework == TRL for one in found)

    def _refuse_whole(self, path: Path_, hints: Mapping[str, Any], problem: str) -> Any:
        """Add the error `problem`, which a dataclass raised on construction, to `problems`. It
        mostly begins with a name of a field in `hints`, or with the dotted name of a key in it."""
        name, _, rest = problem.partition(" ")
        if name.partition(".")[0] in hints and rest and _DOTTED_NAME.fullmatch(name):
            inside = (int(part) if part.isdecimal() else part for part in name.split("."))
            return self._refuse((*path, *inside), rest)
        return self._refuse(path, f"cannot be used: {problem}" if path else problem)

    def _refuse(self, path: Path_, problem: str) -> Any:
        self.problems.append((path, problem))
        return _FAILED


def _may_be_text(kind: Any) -> bool:
    """Whether the type `kind` takes a text in place of a mapping (a `str` or a literal)."""
    return any(member is str or get_origin(member) is Literal for member in members(kind))


def _required(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def allowed_value(kind: Any) -> str:
    """Words, used in messages, for the values that a type allows; unlike `allowed` it names a
    dataclass's required fields."""
    schema = nested_schema(kind) or item_schema(kind)
    if schema is None:
        return allowed(kind)
    required = [field.name for field in dataclasses.fields(schema) if _required(field)]
    listed = f" with at least {', '.join(required)}" if required else ""
    if nested_schema(kind):
        return ("a text or " if _may_be_text(kind) else "") + "a mapping" + listed
    if _may_be_text(item_kind(kind)):
        either = allowed(item_kind(kind)).replace("a mapping", "a mapping" + listed, 1)
        return f"a list (each item {either})"
    return "a list of mappings" + listed


def _prepared(kind: Any, value: Any) -> Any:
    """The value with lists made tuples, and a text such as "1e-6" made a number, if `kind` wants
    these."""
    parts = members(kind)
    for part in parts:
        if get_origin(part) is Mapping and isinstance(value, Mapping):
            key_kind, item_kind = get_args(part)
            prepared = {
                _prepared_key(key_kind, key): _prepared(item_kind, v) for key, v in value.items()
            }
            return prepared if len(prepared) == len(value) else value
        if get_origin(part) is tuple and isinstance(value, list):
            inner = get_args(part)
            return tuple(_prepared(inner[0], item) for item in value)
    if isinstance(value, str) and float in parts and str not in parts:
        try:
            number = float(value)
        except ValueError:
            return value
        return number if math.isfinite(number) else value
    return value


def _converted(value: Any, kind: Any) -> Any:
    """The value as the type `kind` has it, which for most types is the same: a whole number is
    made a `float` where one is wanted. Raises `msgspec.ValidationError` if it is of another type,
    or a number that is not finite."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple and isinstance(value, tuple):
        if arguments[-1] is Ellipsis:
            return tuple(_converted(item, arguments[0]) for item in value)
        if len(arguments) == len(value):
            return tuple(map(_converted, value, arguments))
    if origin is Mapping and isinstance(value, Mapping):
        return {_converted(k, arguments[0]): _converted(v, arguments[1]) for k, v in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        raise msgspec.ValidationError("the number is not finite")
    parts = members(kind)
    if len(parts) == 1:
        return msgspec.convert(value, kind, strict=True)
    # One by one, as msgspec takes no union of a text and a literal; 1 is an int before a float.
    for part in sorted(parts, key=lambda part: part is not type(value)):
        with contextlib.suppress(msgspec.ValidationError):
            return _converted(value, part)
    raise msgspec.ValidationError("no type of the union fits")


def _prepared_key(kind: Any, key: Any) -> Any:
    """A mapping's key as the type `kind` wants it: YAML gives a text even for a number."""
    if kind is int and isinstance(key, str) and key.isdecimal():
        return int(key)
    return _prepared(kind, key)


def _leaves_of(value: Mapping[Any, Any]) -> Iterator[tuple[Path_, Any]]:
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from (((key, *rest), leaf) for rest, leaf in _leaves_of(item))
        else:
            yield (key,), item


def _unprintable(value: Any) -> str:
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            return "bytes that are not UTF-8"
        return "a NUL character" if "\0" in value else ""
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, list):
        return next((found for item in value if (found := _unprintable(item))), "")
    return ""


def _show(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        value = f'"{value}"'
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def to_plain_value(value: Any) -> Any:
    """Returns the value with all dataclasses, tuples and mappings in it as dicts and lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: to_plain_value(getattr(value, field.name))
            for field in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return {key: to_plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain_value(item) for item in value]
    return value
