"""Environments of other packages, as `Environment`: `gem:NAME`, `gymnasium:NAME`, `openenv:URL`,
`reasoning-gym:TASK`, `verifiers:NAME`; and `program:COMMAND`, which needs none.

One module each, which alone imports its package; nothing here does. Each has `factory(name,
arguments)` and `rows(name, arguments)`, which this module calls. Their environments have, beside
`reset` and `step`, the attribute `deterministic` (the same seed and actions bring the same answers)
and perhaps `tools` (the schemas that the model is told of) and `close`, to be called when an
episode is over or given up. A factory with `is_quick = True` makes them without blocking."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from rollpacker.did_you_mean import did_you_mean
from rollpacker.environments.environment import Environment
from rollpacker.integrations.environments.messages import AdapterError

PACKAGES = {
    "gem": "gem",
    "gymnasium": "gymnasium",
    "openenv": "openenv",
    "program": "program",
    "reasoning-gym": "reasoning_gym",
    "verifiers": "verifiers",
}
"""The module here for each name before the colon."""

__all__ = ["PACKAGES", "AdapterError", "is_adapted", "load", "rows"]


def is_adapted(name: str) -> bool:
    """Whether `name` is `package:NAME` of one of `PACKAGES`, rather than a function of somebody."""
    package, colon, rest = name.partition(":")
    return bool(colon and rest) and package in PACKAGES


def load(name: str, arguments: Mapping[str, Any]) -> Callable[[], Environment]:
    """The function that makes an episode's environment, to be called in the process that plays it.

    `name`: `package:NAME`. `arguments`: those of the adapter (its module's docstring) and, where
    its package takes any, those of the environment. Imports the package. Raises `AdapterError` for
    a name or argument that cannot be, `MissingPackageError` naming the extra.
    """
    module, rest = _module_of(name)
    return module.factory(rest, dict(arguments))  # type: ignore[no-any-return]


def rows(name: str, arguments: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The rows that the package's environment brings along, so that a run needs no dataset: each
    goes to `reset`, with a `seed`. None if it has none of its own. `arguments` and errors as with
    `load`; `num_rows` says how many rows to make where their number is free."""
    module, rest = _module_of(name)
    return module.rows(rest, dict(arguments))  # type: ignore[no-any-return]


def _module_of(name: str) -> tuple[Any, str]:
    package, _, rest = name.partition(":")
    if package not in PACKAGES:
        raise AdapterError(
            f'"{name}": no environments of {package} are known.{did_you_mean(package, PACKAGES)}'
            f" Known are {', '.join(PACKAGES)}."
        )
    if not rest:
        what, kind = ("command", "COMMAND") if package == "program" else ("environment", "NAME")
        raise AdapterError(f'"{name}" names no {what}; write "{package}:{kind}".')
    return importlib.import_module(f"{__name__}.{PACKAGES[package]}"), rest
