"""Imports by name: functions that a config names, and packages that only optional features need.

The name of a function is `module:function` or `path/to/file.py:function`; or `<python>:name` for an
object that a program passed to `train`. An optional feature calls `require` before it imports its
package, so that a missing package is one sentence instead of a traceback.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import logging
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from rollpacker.did_you_mean import did_you_mean, did_you_mean_file


class ImportSpecError(ValueError):
    """A function that a config names cannot be loaded; the message says what to do."""


class MissingPackageError(ValueError):
    """The package of an optional feature is not installed; the message says how to install it."""


GIVEN = "<python>:"
"""Prefix of a config's name for an object that a program passed to `train`."""

_given: ContextVar[Mapping[str, Any]] = ContextVar("given", default=MappingProxyType({}))


@contextmanager
def giving(objects: Mapping[str, Any]) -> Iterator[None]:
    """A context in which `given("<python>:NAME")` returns these objects by their names, in this
    thread and in tasks started in it."""
    token = _given.set({**_given.get(), **objects})
    try:
        yield
    finally:
        _given.reset(token)


def is_given(spec: str) -> bool:
    return spec.startswith(GIVEN)


def given(spec: str) -> Any:
    """Returns the object that a program passed as `<python>:name`, or raises `ImportSpecError`."""
    name = spec.removeprefix(GIVEN)
    objects = _given.get()
    if name not in objects:
        raise ImportSpecError(
            f'"{spec}" is an object that a Python program gave to rollpacker.train, which only that'
            " program has. Go on from there, with the same rewards=, data= and resume=True; or"
            " name a function or file in its place."
        )
    return objects[name]


def pickled_given(spec: str, destination: str) -> bytes:
    """Returns the object that a program passed as `<python>:name`, pickled together with what it
    refers to. Raises `ImportSpecError` if it cannot be pickled. `destination`: the processes that
    get it, for this message."""
    import cloudpickle

    found = given(spec)
    try:
        return cloudpickle.dumps(found)  # type: ignore[no-any-return]  # it is untyped
    except Exception as error:  # whatever the user's objects say of being copied
        said = " ".join(str(error).split())[:200]
        raise ImportSpecError(
            f"{spec.removeprefix(GIVEN)} cannot be sent to {destination}: {type(error).__name__}:"
            f" {said}. It may only refer to what can be copied: make locks, files, connections and"
            " models inside of it, at its first call, or name a function in a file."
        ) from error


def missing(package: str, *, extra: str, what: str) -> str | None:
    """Returns a sentence that names the extra to install; None if `package` is installed (it is not
    imported). `what` begins the sentence, such as "drawing the timeline" or "the reward math"."""
    try:
        found = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        found = None
    if found is not None and found.origin is not None:  # None: a mere folder of the same name
        return None
    return f"{what} needs {package}, which is not installed: pip install 'rollpacker[{extra}]'"


_NOISE = {
    "torchao": ("Failed to load /",),
    "torchao.kernel.intmm": ("Warning: Detected no triton",),
    "torch.utils._pytree": ("%s is an Enum subclass", "<enum "),
    "bitsandbytes.backends.cpu.ops": ("Failed to load CPU gemm_4bit_forward",),
}
"""Beginnings of log lines to suppress, by name of the logger. Packages log these lines about
optional kernels when they are imported, and users cannot do anything about them."""


def silence_noise() -> None:
    """Suppress the log lines of `_NOISE`, and no others, in this process."""
    for name, beginnings in _NOISE.items():
        logger = logging.getLogger(name)
        if not any(isinstance(one, _NoNoise) for one in logger.filters):
            logger.addFilter(_NoNoise(beginnings))


class _NoNoise(logging.Filter):
    def __init__(self, beginnings: tuple[str, ...]) -> None:
        super().__init__()
        self._beginnings = beginnings

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(self._beginnings)


def require(package: str, *, extra: str, what: str) -> None:
    """Raise `MissingPackageError`, with the sentence of `missing`, if `package` is not installed.
    The caller imports it, so that type checkers know the module."""
    sentence = missing(package, extra=extra, what=what)
    if sentence is not None:
        raise MissingPackageError(sentence)


def load_function(spec: str) -> Callable[..., Any]:
    """Returns the function that `module:function` or `file.py:function` (relative to the working
    folder) names. Its module is run once, however often it is named. Raises `ImportSpecError`."""
    if is_given(spec):
        return given(spec)  # type: ignore[no-any-return]
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        raise ImportSpecError(
            f'"{spec}" names no function; write "module:function" or "path/to/file.py:function".'
        )
    is_file = place.endswith(".py") or "/" in place
    module = _module_of_file(place, spec) if is_file else _module_by_name(place, spec)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            public = [k for k in dir(found) if not k.startswith("_")]
            hint = did_you_mean(part, public)
            raise ImportSpecError(f'"{spec}": {place} has no {name}.{hint}')
        found = getattr(found, part)
    if not callable(found):
        raise ImportSpecError(f'"{spec}" is a {type(found).__name__}, not a function.')
    return found  # type: ignore[no-any-return]


def is_async(function: Callable[..., Any]) -> bool:
    """Whether `function` is a coroutine function, or an object whose `__call__` is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )


def file_of(spec: str) -> Path | None:
    """Returns the file in `path/to/file.py:function`; None for a module, or if there is no file."""
    place = Path(spec.rpartition(":")[0]).expanduser().resolve()
    return place if place.suffix == ".py" and place.is_file() else None


def forget_file(path: Path) -> None:
    """Forget that this file was imported, so that the next `load_function` runs it again."""
    sys.modules.pop(_name_of_file(path), None)


def _name_of_file(path: Path) -> str:
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    return f"rollpacker_file_{path.stem}_{digest}"


def _module_by_name(name: str, spec: str) -> ModuleType:
    here = str(Path.cwd())
    added = here not in sys.path and "" not in sys.path
    if added:  # the console script does not put the working folder on the path, `python -m` does
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise ImportSpecError(
                f'"{spec}": there is no module {error.name}. Install it, or name a file:'
                f' "path/to/file.py:function" (relative to {here}).'
            ) from None
        raise _raised(spec, name, error) from None
    except (Exception, SystemExit) as error:
        raise _raised(spec, name, error) from None
    finally:
        if added:
            sys.path.remove(here)


def _module_of_file(place: str, spec: str) -> ModuleType:
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        hint = did_you_mean_file(path, path.parent.glob("*.py"))
        raise ImportSpecError(f'"{spec}": there is no file {path}.{hint}')
    name = _name_of_file(path)
    if name in sys.modules:
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise ImportSpecError(f'"{spec}": {path} is no Python file.')
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # its dataclasses look themselves up here
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _raised(spec, str(path), error) from None
    return module


def _raised(spec: str, place: str, error: BaseException) -> ImportSpecError:
    """Returns the error for a user's module that failed at import: what it raised, and in which
    line."""
    if isinstance(error, SyntaxError):
        where = f"{error.filename}, line {error.lineno}"
        return ImportSpecError(f'"{spec}": {where}: {type(error).__name__}: {error.msg}.')
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "importlib" not in frame.filename and frame.filename != __file__
    ]
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return ImportSpecError(
        f'"{spec}": importing {place} raised {type(error).__name__}: {error}{where}.'
    )
