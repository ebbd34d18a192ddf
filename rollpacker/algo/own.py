"""Algorithms from outside of the package: whole ones (`algorithm.function`), or an advantage or a
loss alone (`algorithm.advantage_function`, `algorithm.loss_function`). Light: no torch.

A function is given what its signature names, by name, as reward functions are.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from rollpacker.algo.row import Row
from rollpacker.did_you_mean import did_you_mean
from rollpacker.imports import ImportSpecError, file_of, forget_file, load_function

ADVANTAGE_ARGUMENTS = (
    *("rewards", "group_ids", "lengths", "rewards_by_name", "truncated", "tokens"),
    *("token_rewards", "log_probs", "rollout_log_probs", "ref_log_probs"),
    *("teacher_log_probs", "values", "config"),
)
"""Arguments that an advantage function may take, by name. docs/algorithms.md explains each."""
LOSS_ARGUMENTS = (
    *("log_probs", "old_log_probs", "advantages", "sample_ids", "num_samples"),
    *("ref_log_probs", "rollout_log_probs", "entropy", "config"),
)
"""Arguments that a loss function may take, by name. docs/algorithms.md explains each."""

_KINDS = {"advantages": ADVANTAGE_ARGUMENTS, "loss": LOSS_ARGUMENTS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """A user's whole algorithm, which the function named in `algorithm.function` returns. Fields
    that are left out: the package's own switches, advantages or loss."""

    row: Row = field(default_factory=Row)
    """Values of the switches that the config leaves at null. If `advantages` compares samples of
    the whole step, `normalize_mean` must be "batch", so that all are awaited; if it works with a
    single sample per prompt, "none"."""
    advantages: Callable[..., Any] | None = None
    """Function for advantages, in place of normalize_mean and normalize_std; as
    `algorithm.advantage_function`, which has precedence. None: the package's own."""
    loss: Callable[..., Any] | None = None
    """Function for the loss, in place of the objective; as `algorithm.loss_function`, which has
    precedence. None: the package's own."""


@dataclass(frozen=True, slots=True)
class OwnFunction:
    """A user's function and the arguments that it takes."""

    said_by: str
    """Config key and value that name the function, for messages:
    algorithm.loss_function=my.py:g."""
    function: Callable[..., Any]
    takes: frozenset[str]

    def __call__(self, **known: object) -> Any:
        """Call the function with the arguments of `known` that it takes, and return its result."""
        return self.function(**{name: known[name] for name in known if name in self.takes})


@cache
def own_algorithm(function: str) -> Algorithm:
    """Calls the function that `function` names (as `path/to/file.py:function` or `module:function`)
    and returns its `Algorithm`. Raises `ValueError` if it returns anything else."""
    make: Callable[[], object] = load_function(function)
    made = make()
    if not isinstance(made, Algorithm):
        raise ValueError(
            f'"{function}" must return a rollpacker.algo.Algorithm, not a {type(made).__name__}'
        )
    return made


@cache
def own_function(kind: str, key: str, spec: str) -> OwnFunction:
    """Return the user's function for "advantages" or "loss" (`kind`). `key`: the key of `algorithm`
    that names it; with "function" it is part of an `Algorithm`. `spec`: that key's value. Raises
    `ValueError` if there is no such function, or if it takes an argument that is not known."""
    said_by = f"algorithm.{key}={spec}"
    if key == "function":
        made = own_algorithm(spec)
        function = made.advantages if kind == "advantages" else made.loss
        assert function is not None, "whoever asks has looked"
    else:
        try:
            function = load_function(spec)
        except ImportSpecError as error:
            raise ValueError(f"algorithm.{key}={error}") from None
    return OwnFunction(said_by, function, _taken(function, _KINDS[kind], said_by))


def file_digests(specs: Mapping[str, str | None]) -> dict[str, str]:
    """SHA-256 of the files in these `path/to/file.py:function`s, by key. None and modules, which
    are named without a file, are left out."""
    files = {key: file_of(spec) for key, spec in specs.items() if spec is not None}
    return {
        key: hashlib.sha256(path.read_bytes()).hexdigest()
        for key, path in files.items()
        if path is not None
    }


_loaded: dict[Path, str] = {}
"""SHA-256 digest of each file as it was when a config named it last."""


def reload_changed(specs: Iterable[str | None]) -> None:
    """Forget the functions of files that have changed since they were loaded, so that the next use
    loads the file again: users edit files while their notebook's process goes on."""
    for spec in specs:
        path = None if spec is None else file_of(spec)
        if path is None:
            continue
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if _loaded.setdefault(path, digest) != digest:
            _loaded[path] = digest
            forget_file(path)
            own_algorithm.cache_clear()
            own_function.cache_clear()


def _taken(function: Callable[..., Any], known: tuple[str, ...], said_by: str) -> frozenset[str]:
    """Return the names of `known` arguments that the function takes. Raises `ValueError` if it
    needs others; `said_by` names the function in the message."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise ValueError(f"{said_by}: its signature cannot be read; wrap it in a def") from None
    taken: set[str] = set()
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            return frozenset(known)
        if parameter.kind is parameter.VAR_POSITIONAL:
            continue
        if parameter.name in known and parameter.kind is not parameter.POSITIONAL_ONLY:
            taken.add(parameter.name)
        elif parameter.default is parameter.empty:
            hint = did_you_mean(parameter.name, known)
            raise ValueError(
                f"{said_by}: there is no argument {parameter.name} to give it.{hint} Arguments are"
                f" given by name; there are: {', '.join(known)}"
            )
    return frozenset(taken)
