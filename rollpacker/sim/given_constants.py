"""What becomes of measured constants in a scenario's file if an override changes its model or GPU.

A file's `train.fixed_s` and `sync_s` were measured or fitted for the file's model. For another
model they would be wrong by several times, so they are left out and power laws are used instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollpacker.config.document import parse_document, parse_value, read_text

CONSTANTS = ("train.fixed_s", "sync_s")
"""Keys of a scenario whose values hold only for one model on one kind of GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenConstants:
    """Constants that a scenario's file gives and no override sets, and whether an override changes
    the model or the GPU."""

    values: Mapping[str, Any]
    """Value of each constant by its key. Constants that an override sets are left out."""
    model: tuple[str, str] | None
    """Names of two language models: the one whose constants the scenario's file gives, and the one
    that overrides put in its place. None: it is the same model."""
    gpu: tuple[str, str] | None
    """Names of the file's GPU and of the one that overrides set. None: it is the same GPU."""

    @property
    def resets(self) -> list[str]:
        """Overrides that set the file's constants to null, so that power laws replace them; empty
        if no override changes the model."""
        return [] if self.model is None else [f"{key}=null" for key in self.values]

    def describe(self) -> str:
        """Returns a sentence, for below a table, on whether the file's constants are used for
        another model or GPU. Empty: these are the file's own, or the file gives no constants."""
        if not self.values:
            return ""
        named = " and ".join(f"{key}={value:g}" for key, value in self.values.items())
        is_one = len(self.values) == 1
        if self.model is not None:
            before, now = self.model
            laws = "it is taken from its power law" if is_one else "they come from power laws"
            return (
                f"The file gives {named} for {before}, so that for {now} {laws} of the "
                f"parameters: set {'it' if is_one else 'them'} to what you know."
            )
        if self.gpu is not None:
            before, now = self.gpu
            return (
                f"{named} {'is' if is_one else 'are'} the file's, given for {before} and kept for "
                f"{now}: set {'it' if is_one else 'them'} to what you know (null takes the power "
                "law, which was fitted to H800s)."
            )
        return ""


def given_constants(path: str | Path, overrides: Sequence[str]) -> GivenConstants:
    """Returns the constants that a scenario's file gives, and whether the overrides change its
    model or GPU. Raises `ConfigError` if the file cannot be read."""
    tree, _ = parse_document(read_text(path), str(path))
    changed = dict(text.split("=", 1) for text in overrides if "=" in text)
    values = {}
    for key in CONSTANTS:
        section = key.partition(".")[0]
        value = _at(tree, key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and not {key, section} & changed.keys():
            values[key] = value
    return GivenConstants(
        values=values,
        model=_difference(tree, "model", changed),
        gpu=_difference(tree, "cluster.gpu", changed),
    )


def _difference(
    tree: Mapping[str, Any], key: str, changed: Mapping[str, str]
) -> tuple[str, str] | None:
    """The value of `key` in a file and the one that overrides (`changed`, values by key) set, as
    names to print. None if they are the same."""
    before = _at(tree, key)
    for name, text in reversed(list(changed.items())):
        inside = name.startswith(f"{key}.")
        if name != key and not inside:
            continue
        now = parse_value(text, name)
        if not inside and now == before:
            return None
        return _named(before, "the file's own"), _named({} if inside else now, "one of its own")
    return None


def _at(tree: Mapping[str, Any], key: str) -> Any:
    at: Any = tree
    for part in key.split("."):
        at = at.get(part) if isinstance(at, Mapping) else None
    return at


def _named(value: Any, otherwise: str) -> str:
    return value if isinstance(value, str) else otherwise
