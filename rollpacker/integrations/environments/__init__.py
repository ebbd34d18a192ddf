"""Environments of other packages, in the form of `Environment`: `gem:NAME`, `gymnasium:NAME`,
`openenv:URL`, `reasoning-gym:TASK`, `verifiers:NAME`; and `program:COMMAND`, which needs no
package.

There is one module (an adapter) for each, which alone imports its package. Every module has
`factory(name, arguments)` and `rows(name, arguments)`, which this module calls. Its environments
have, beside `reset` and `step`, the attribute `deterministic` (whether the same seed and actions
lead to the same answers), and perhaps `tools` (schemas to show to the model) and `close`, to be
called at the end of an episode. A factory's result with `is_quick = True` makes environments
without blocking.
"""

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
"""Names of the adapters' modules in this package, by the package's name as the config
writes it before the colon."""

__all__ = ["PACKAGES", "AdapterError", "is_adapted", "load", "rows"]


def is_adapted(name: str) -> bool:
    """Whether `name` is `package:NAME` with one of the `PACKAGES` that have an adapter. Else it is
    a user's `module:function`."""
    package, colon, rest = name.partition(":")
    return bool(colon and rest) and package in PACKAGES


def load(name: str, arguments: Mapping[str, Any]) -> Callable[[], Environment]:
    """Return the function that makes an episode's environment, to be called in the process that
    plays it. `name`: `package:NAME`. `arguments`: those of the adapter (see its module's
    docstring), and, if its package has any, those of the environment. Imports the package. Raises
    `AdapterError` for an impossible name or argument, and `MissingPackageError` with the extra to
    install."""
    module, rest = _module_of(name)
    return module.factory(rest, dict(arguments))  # type: ignore[no-any-return]


def rows(name: str, arguments: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The rows that the package's environment provides, so that a run needs no dataset. Each
    is given to `reset`, with a `seed`. None: it has no rows of its own. `arguments` are as
    in `load`; `num_rows` is the number of rows if the environment does not fix that. Raises
    the same errors as `load`."""
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
