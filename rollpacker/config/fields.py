"""The fields of a schema and their types, as a config's checks and hints ask for them."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from typing import Any, Union, get_args, get_origin


@functools.cache
def field_types(schema: type) -> dict[str, Any]:
    """The resolved type of every field of a dataclass."""
    return typing.get_type_hints(schema)


def members(kind: Any) -> tuple[Any, ...]:
    """The alternatives of a union; a tuple of one for anything else."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def nested_schema(kind: Any) -> type | None:
    """The dataclass that a value of this type is made into. None: the type has no dataclass."""
    return next((m for m in members(kind) if dataclasses.is_dataclass(m)), None)  # type: ignore[return-value]


def item_schema(kind: Any) -> type | None:
    """The dataclass of the items, where the type is `tuple[SomeDataclass, ...]`; else None."""
    item = item_kind(kind)
    return None if item is None else nested_schema(item)


def item_kind(kind: Any) -> Any:
    """The type of a list's items; None for a type that is no list."""
    return next((get_args(m)[0] for m in members(kind) if get_origin(m) is tuple), None)
