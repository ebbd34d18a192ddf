"""Hints for unknown keys of a config, from what other frameworks call our keys. The table is
`synonyms.yaml`; docs/migration.md shows it.

A key of the table is recognized in any section and with any part of its path: `n`, `rollout.n`,
`actor_rollout_ref.rollout.n`. Some lines of the table are for one value of their key.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from rollpacker.config.fields import field_types, item_schema, nested_schema

TABLE = Path(__file__).with_name("synonyms.yaml")
MOST_PLACES = 2
"""A key of ours in the wrong section gets a hint if it has at most this many right places."""

TRL = "TRL"
TRL_DIFFERS = (
    "What TRL's defaults are here (schedule, betas, loss, chat template): docs/migration.md,"
    ' "What means something else".'
)
"""Message on where the docs compare TRL's settings, printed if a config had keys of TRL's."""


@dataclass(frozen=True, slots=True)
class Synonym:
    """A line of `synonyms.yaml`: a key of another framework, and our keys that mean the same."""

    framework: str
    theirs: str
    """Key of the other framework, or `key=value` if the line is for one value."""
    ours: tuple[str, ...]
    """Our keys that mean the same, or `key=value` if a value of ours does. Empty: none does."""
    note: str
    """How our keys differ from the other framework's, or why there is no key of ours."""

    @property
    def key(self) -> str:
        """Key of the other framework in this line of `synonyms.yaml`, without a value."""
        return self.theirs.partition("=")[0]

    @property
    def value(self) -> str:
        """Pattern of the values of the other framework's key that this line is for. Empty: all."""
        return self.theirs.partition("=")[2]

    @property
    def keys(self) -> tuple[str, ...]:
        """Our keys in this line of `synonyms.yaml`, without values."""
        return tuple(one.partition("=")[0] for one in self.ours)


@functools.cache
def synonyms() -> tuple[Synonym, ...]:
    """All lines of `synonyms.yaml`, in the file's order."""
    table = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return tuple(
        Synonym(framework, theirs, tuple(ours.split(", ")) if ours else (), note)
        for framework, rows in table.items()
        for theirs, entry in rows.items()
        for ours, note in [(entry, "") if isinstance(entry, str) else entry]
    )


def hint(path: Collection[str | int], known: Collection[str], value: Any = "") -> str:
    """Returns the hint ` Here it is ...` for an unknown key, or why there is no such key; empty if
    nothing is known of it. `path` is the key's path and `value` what it was set to. `known` are all
    dotted keys of the config's dataclasses, with `N` for an index: only these are named in hints. A
    key of ours in the wrong section gets a hint, too."""
    return said(of_others(path, known, value)) or elsewhere(str([*path][-1]), known)


def of_others(
    path: Collection[str | int], known: Collection[str], value: Any = ""
) -> list[Synonym]:
    """The lines of `synonyms.yaml` for the key `path`, set to `value`, that are of other frameworks
    and name keys in `known` (all keys of the config); empty if there are none."""
    parts = [str(part).lstrip("+-").replace("-", "_") for part in path]
    return _best(parts, known, value)


def of_value(path: Collection[str | int], known: Collection[str], value: Any) -> list[Synonym]:
    """The line of `synonyms.yaml`, at most one, for a key of ours at `path` that is set to another
    framework's `value`. `known` are all keys of the config."""
    ours = ".".join(str(part) for part in path if not isinstance(part, int))
    for_any = {one.theirs: one.keys for one in synonyms() if not one.value}
    return [
        one
        for one in synonyms()
        if _is_for(one, value)
        and _applies(one, known)
        and ours in (*one.keys, *(for_any.get(one.key, ()) if not one.keys else ()))
    ][:1]


def said(found: Collection[Synonym]) -> str:
    """Returns the hint that these lines of `synonyms.yaml` make; empty for no lines."""
    return f" {'; '.join(_sentence(one, len(found) > 1) for one in found)}" if found else ""


def elsewhere(name: str, known: Collection[str]) -> str:
    """Returns the hint ` Here it is ...` for a key `name` of ours in the wrong section; empty if it
    is no key in `known`, or one in more than `MOST_PLACES` sections. Keys of list entries (`a.0.b`)
    are named only if no other key has the name."""
    if name in known:
        return f" Here it is {name}"
    places = [key for key in known if key.rpartition(".")[2] == name]
    single = [key for key in places if ".N." not in key]
    places = single or [key.replace(".N.", ".0.") for key in places]
    return f" Here it is {' or '.join(places)}" if 0 < len(places) <= MOST_PLACES else ""


def _best(parts: list[str], known: Collection[str], value: Any) -> list[Synonym]:
    """Lines of `synonyms.yaml` whose keys share the most names at the end with the path `parts`. Of
    lines that give the same hint only the first is returned."""
    best: list[Synonym] = []
    most = (1, False, False)
    for one in synonyms():
        theirs = one.key.split(".")
        count = _num_shared(parts, theirs)
        shared = (count, count == len(theirs), bool(one.value))
        if shared < most or not _applies(one, known) or (one.value and not _is_for(one, value)):
            continue
        if shared > most:
            best, most = [], shared
        if (one.ours, bool(one.ours) or one.note) not in [
            (other.ours, bool(other.ours) or other.note) for other in best
        ]:
            best.append(one)
    return best


def _is_for(one: Synonym, value: Any) -> bool:
    """Whether this line of `synonyms.yaml` is for certain values of its key only and `value` is one
    of them, alone or as the only item of a list."""
    if isinstance(value, list) and len(value) == 1:
        (value,) = value
    return bool(one.value) and fnmatch.fnmatchcase(str(value).lower(), one.value)


def _applies(one: Synonym, known: Collection[str]) -> bool:
    """Whether this line of `synonyms.yaml` may be used for a config with the keys `known`: it has
    our keys of the line, and `algorithm.name`, which simulations' configs lack."""
    return "algorithm.name" in known and all(key in known for key in one.keys)


def _num_shared(parts: list[str], theirs: list[str]) -> int:
    """Number of names at the end that the paths `parts` and `theirs` of two keys share. It is 0
    unless one path ends with the whole other, or the last name means something by itself:
    `ppo_mini_batch_size` does, `path` does not."""
    count = 0
    for own, their in zip(reversed(parts), reversed(theirs), strict=False):
        if own != their:
            break
        count += 1
    whole = count == min(len(parts), len(theirs))
    return count if whole or (count and "_" in parts[-1]) else 0


def _sentence(one: Synonym, among_others: bool) -> str:
    of = f" (as in {one.framework})" if among_others else ""
    note = f": {one.note}" if one.note else ""
    if not one.ours:
        return f"There is none{of}{note}"
    *most, last = one.ours
    listed = f"{', '.join(most)} and {last}" if most else last
    return f"Here it is {listed}{of}{note}"


def all_keys(schema: type, prefix: str = "") -> Iterator[str]:
    """Yields every dotted key of the dataclass `schema` and of those nested in it, each behind
    `prefix`, with `N` for the index of a list."""
    for name, kind in field_types(schema).items():
        yield prefix + name
        inner, items = nested_schema(kind), item_schema(kind)
        if inner is not None:
            yield from all_keys(inner, f"{prefix}{name}.")
        elif items is not None:
            yield from all_keys(items, f"{prefix}{name}.N.")
