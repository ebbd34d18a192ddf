"""Loads a config: a YAML file and `a.b.c=value` overrides, checked once, frozen. Saves it too.

`${a.b}` refers to another value of the same config. Nothing else is looked up, neither environment
variables nor files, and nothing is ever instantiated by name.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from rollpacker.config.check import Checker, to_plain_value
from rollpacker.config.document import (
    ConfigError,
    Path_,
    dotted,
    nearest,
    parse_document,
    parse_value,
    read_text,
    write_document,
)
from rollpacker.config.synonyms import TRL_DIFFERS

__all__ = ["ConfigError", "changes_since", "differences", "load_config", "save_config", "to_plain"]

T = TypeVar("T")

MAX_REFERENCES = 100
_REFERENCE = re.compile(r"\$\{([A-Za-z_]\w*(?:\.\w+)*)\}")


def load_config(
    path: str | Path,
    overrides: Sequence[str],
    schema: type[T],
    below: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
) -> T:
    """Read a config file, apply the overrides, and return it as an instance of the dataclass
    `schema`. `below` is called with the values of file and overrides, and returns values for keys
    that neither sets; None: `schema` has their defaults. Raises `ConfigError` with one message that
    lists everything that is wrong."""
    tree, lines = parse_document(read_text(path), str(path))
    return config_of(tree, overrides, schema, below, where=str(path), lines=lines)


def config_of(
    tree: dict[str, Any],
    overrides: Sequence[str],
    schema: type[T],
    below: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
    *,
    where: str = "config",
    lines: Mapping[Path_, int] | None = None,
) -> T:
    """As `load_config`, but from the plain values `tree`, in place of a file. The overrides are
    applied to `tree` itself. `where` begins the messages of errors; `lines` maps a key's path to
    the key's line in a file (None: there is no file)."""
    lines = lines or {}
    problems: list[str] = []
    raw: dict[Path_, str] = {}
    for override in overrides:
        try:
            target, text = _override(tree, override)
            raw[target] = text
        except ConfigError as error:
            problems.append(str(error))
    tree, found = _resolved(tree)
    if below is not None:
        tree = _merged(below(tree), tree)
    checker = Checker(raw)
    config = checker.build(schema, tree, ())
    for place, problem in found + checker.problems:
        end = "" if problem.endswith(("?", ".", ")")) else "."
        subject = f"{dotted(place)}{_origin(place, raw, lines)} " if place else ""
        problems.append(f"{subject}{problem}{end}")
    if problems:
        about_trl = f"\n{TRL_DIFFERS}" if checker.names_trl else ""
        raise ConfigError(_message(where, problems) + about_trl)
    return cast(T, config)


def _message(path: str, problems: list[str]) -> str:
    if len(problems) == 1:
        return f"{path}: {problems[0]}"
    return f"{path}: {len(problems)} problems\n" + "\n".join(f"  - {p}" for p in problems)


def _origin(place: Path_, raw: Mapping[Path_, str], lines: Mapping[Path_, int]) -> str:
    """A note on where the key `place` was set, to follow its name in a message: by an override
    (`raw` has their texts by path), or in which line (`lines` by path). Empty: nowhere."""
    inside = (path for path in raw if path[: len(place)] == place and place not in lines)
    for path in [*inside, *(place[:size] for size in range(len(place), 0, -1))]:
        if path in raw:
            return f" (override {dotted(path)}={raw[path]})"
        if path in lines:
            return f" (line {lines[path]})"
    return ""


def _override(tree: dict[str, Any], override: str) -> tuple[Path_, str]:
    """Set a key of `tree` by an override `a.b.0.c=value`; returns its path and the value's text."""
    name, equals, text = override.partition("=")
    name = name.strip()
    if not equals or not name:
        raise ConfigError(f'override "{override}": expected key=value, such as train.steps=20.')
    value = parse_value(text, f'override "{override}"')
    parts = name.split(".")
    if not all(parts):
        raise ConfigError(f'override "{override}": the key {name} has an empty part.')
    at: Any = tree
    path: list[str | int] = []
    for index, part in enumerate(parts):
        last = index == len(parts) - 1
        key = _step(at, part, path, override)
        path.append(key)
        if last:
            at[key] = value
        elif isinstance(at, dict) and not isinstance(at.get(key), dict | list):
            if at.get(key) is not None:
                raise ConfigError(
                    f'override "{override}": {dotted(tuple(path))} is a single value,'
                    " it has no keys."
                )
            at[key] = {}
        at = at[key]
    return tuple(path), text


def _step(at: Any, part: str, path: list[str | int], override: str) -> str | int:
    if isinstance(at, dict):
        return part
    if not isinstance(at, list):
        raise ConfigError(
            f'override "{override}": {dotted(tuple(path))} is a single value, it has no keys.'
        )
    if not part.isdecimal() or int(part) >= len(at):
        entries = f"0 to {len(at) - 1}" if at else "none, the list is empty"
        raise ConfigError(
            f'override "{override}": {dotted(tuple(path))} is a list; entries: {entries}.'
        )
    return int(part)


def _merged(below: Any, above: Any) -> Any:
    """Adds to plain values `above` the keys that only `below` has, also in inner mappings."""
    if not (isinstance(below, Mapping) and isinstance(above, Mapping)):
        return above
    added = {key: value for key, value in below.items() if key not in above}
    return {key: _merged(below.get(key), value) for key, value in above.items()} | added


def _leaves(value: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    else:
        yield path, value


def _resolved(tree: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[Path_, str]]]:
    """Returns the tree with every reference `${a.b}` replaced by the value referred to, and a list
    of references that are not allowed, each as (path of the key that has it, problem)."""
    references = [(p, v) for p, v in _leaves(tree) if isinstance(v, str) and "${" in v]
    if not references:
        return tree, []
    num_references = sum(value.count("${") for _, value in references)
    if num_references > MAX_REFERENCES:
        return tree, [((), f"more than {MAX_REFERENCES} references ${{...}} in one config")]
    problems = []
    for path, value in references:
        problem = _reference_problem(tree, value)
        if problem:
            problems.append((path, f'is "{value}": {problem}'))
    if problems:
        return tree, problems
    return cast(dict[str, Any], _replaced(tree, tree)), []


def _replaced(value: Any, tree: Mapping[str, Any]) -> Any:
    """The value with every reference in it replaced: by what it refers to or, inside of a longer
    text, by that as a text."""
    if isinstance(value, dict):
        return {key: _replaced(item, tree) for key, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item, tree) for item in value]
    if not isinstance(value, str):
        return value
    if whole := _REFERENCE.fullmatch(value):
        return copy.deepcopy(_referred(whole[1], tree))
    return _REFERENCE.sub(lambda found: str(_referred(found[1], tree)), value)


def _referred(name: str, tree: Any) -> Any:
    for part in name.split("."):
        tree = tree[int(part) if isinstance(tree, list) else part]
    return tree


def _reference_problem(tree: dict[str, Any], value: str) -> str:
    """Returns why references in this text are refused; empty if they are fine. A reference may not
    lead to another one, so that nothing goes in circles or grows without bound."""
    if "${" in _REFERENCE.sub("", value) or "\\${" in value:
        return "only ${key} or ${part.key} of this config may be referred to, nothing else"
    for name in _REFERENCE.findall(value):
        at: Any = tree
        for part in name.split("."):
            if isinstance(at, list) and part.isdecimal() and int(part) < len(at):
                at = at[int(part)]
            elif isinstance(at, dict) and part in at:
                at = at[part]
            else:
                known = (str(key) for key in at) if isinstance(at, dict) else ()
                return f"this config sets no {name}.{nearest(part, known)}".rstrip(".")
        if any(isinstance(leaf, str) and "${" in leaf for _, leaf in _leaves(at)):
            return f"{name} is itself a reference; refer to the value directly"
    return ""


def to_plain(config: object) -> dict[str, Any]:
    """The config as dicts and lists, with all defaults written out."""
    return cast(dict[str, Any], to_plain_value(config))


def save_config(config: object, path: str | Path, *, comment: str = "") -> None:
    """Write the config, with all defaults, as YAML below a comment: the whole file or nothing.
    `load_config` reads back an equal config."""
    write_document(to_plain(config), path, comment=comment)


def changes_since(old: Mapping[str, Any], config: object) -> list[tuple[str, object, object]]:
    """The `differences` between an earlier config, as plain values, and this one. A key that the
    earlier one lacks is newer than that config, and counts as set to its default."""
    plain = to_plain(config)
    return differences(_completed(old, config), plain)


def _completed(old: Any, config: Any) -> Any:
    """The config `old`, as plain values, with defaults for keys that it lacks. The dataclasses of
    `config`, the present one, say which keys there are."""
    if dataclasses.is_dataclass(config) and isinstance(old, Mapping):
        found = dict(old)
        for field in dataclasses.fields(config):
            if field.name in old:
                found[field.name] = _completed(old[field.name], getattr(config, field.name))
            elif field.default is not dataclasses.MISSING:
                found[field.name] = to_plain_value(field.default)
            elif field.default_factory is not dataclasses.MISSING:
                found[field.name] = to_plain_value(field.default_factory())
        return found
    if isinstance(config, tuple) and isinstance(old, list) and len(old) == len(config):
        return [_completed(*pair) for pair in zip(old, config, strict=True)]
    return old


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, object, object]]:
    """The values in which two configs (as plain values) differ, as (dotted path, old value, new
    value). A key that one config lacks has the value None there."""
    found: list[tuple[str, object, object]] = []
    _compare(old, new, (), found)
    return found


def _compare(old: Any, new: Any, path: Path_, found: list[tuple[str, object, object]]) -> None:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in [*old, *(key for key in new if key not in old)]:
            _compare(old.get(key), new.get(key), (*path, key), found)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (before, after) in enumerate(zip(old, new, strict=True)):
            _compare(before, after, (*path, index), found)
    elif old != new or isinstance(old, bool) != isinstance(new, bool):
        found.append((dotted(path), old, new))
