"""The fields of a config's dataclasses and their types, for checks and hints."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from typing import Any, Union, get_args, get_origin


@functools.cache
def field_types(schema: type) -> dict[str, Any]:
    """Mapping from the name of each field of the dataclass `schema` to its resolved type."""
    return typing.get_type_hints(schema)


def members(kind: Any) -> tuple[Any, ...]:
    """The alternatives of a union type; any other type alone in a tuple."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def nested_schema(kind: Any) -> type | None:
    """The dataclass among the alternatives of the type `kind`. None: there is none."""
    return next((m for m in members(kind) if dataclasses.is_dataclass(m)), None)  # type: ignore[return-value]


def item_schema(kind: Any) -> type | None:
    """The dataclass of the items, if `kind` is the type `tuple[SomeDataclass, ...]`; else None."""
    item = item_kind(kind)
    return None if item is None else nested_schema(item)


def item_kind(kind: Any) -> Any:
    """The type of the items, if the type `kind` is that of a list (a tuple); else None."""
    return next((get_args(m)[0] for m in members(kind) if get_origin(m) is tuple), None)
