"""A run's settings that differ from their defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollpacker.config.check import to_plain_value
from rollpacker.config.document import ConfigError, parse_document, read_text
from rollpacker.config.fields import field_types, item_schema, nested_schema

_MISSING = dataclasses.MISSING
CONFIG_FILE = "config.yaml"


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """A setting's key, value and default, all as texts. A default of None: there is none."""

    key: str
    value: str
    default: str | None


def read_settings(folder: Path) -> tuple[list[Setting], str]:
    """The settings in a run's folder that differ from the defaults, and the text of the config
    file. Both are empty if the config cannot be read. An unknown key has no default."""
    from rollpacker.config.schema import RunConfig

    try:
        text = read_text(folder / CONFIG_FILE)
        tree, _ = parse_document(text, CONFIG_FILE)
    except (ConfigError, OSError):
        return [], ""
    return list(_changed(tree, RunConfig, "")), text


def _changed(tree: dict[str, Any], schema: type, prefix: str) -> Iterator[Setting]:
    fields = {field.name: field for field in dataclasses.fields(schema)}
    kinds = field_types(schema)
    row = _algorithms_row(tree, schema) if prefix == "algorithm." else None
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if name not in fields:
            yield Setting(key, word(value), None)
            continue
        inner, items = nested_schema(kinds[name]), item_schema(kinds[name])
        default = _default(fields[name])
        if row is not None and default is None:
            default = getattr(row, name)
        if inner is not None and isinstance(value, dict):
            yield from _changed(value, inner, f"{key}.")
        elif items is not None and isinstance(value, list) and value:
            for number, item in enumerate(value):
                if isinstance(item, dict):
                    yield from _changed(item, items, f"{key}.{number}.")
                else:
                    yield Setting(f"{key}.{number}", word(item), None)
        elif default is _MISSING:
            yield Setting(key, word(value), None)
        elif to_plain_value(default) != value:
            yield Setting(key, word(value), word(to_plain_value(default)))


def _algorithms_row(tree: dict[str, Any], schema: type) -> Any:
    """The setting of the algorithm in the config `tree`, made of class `schema` with the defaults
    of the algorithm named there. None for an unknown name or a function of the user's."""
    if tree.get("function") is not None:
        return None
    try:
        return schema(**{name: tree[name] for name in ("name",) if name in tree})
    except (TypeError, ValueError):
        return None


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not _MISSING:
        return field.default_factory()
    return field.default


def word(value: Any) -> str:
    """A setting's value as a text, in the notation of the config file."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(map(word, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {word(item)}" for key, item in value.items()) + "}"
    return str(value)
