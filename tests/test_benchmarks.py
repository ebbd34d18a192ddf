"""Every benchmark still finds what it imports. Most run for minutes, and nothing else would notice
a function that has moved."""

import importlib
import pkgutil

import pytest

import benchmarks

NAMES = sorted(module.name for module in pkgutil.iter_modules(benchmarks.__path__))
OPTIONAL = ("ray", "vllm")


@pytest.mark.parametrize("name", NAMES)
def test_it_can_be_imported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `python benchmarks/NAME.py` does, which finds the others of its folder."""
    monkeypatch.syspath_prepend(next(iter(benchmarks.__path__)))
    try:
        importlib.import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in OPTIONAL:
            raise
        pytest.skip(f"{error.name} is not installed")
