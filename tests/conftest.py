"""One torch thread (threads fight on small machines), no network, fast tests first."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from hypothesis import HealthCheck, settings

# A change must not fail for an example that has nothing to do with it: on the build machine the
# examples are fixed, on a developer's they are fresh.
# How long examples take to draw says something of the machine alone, which is shared.
quiet = [HealthCheck.too_slow]
settings.register_profile("here", suppress_health_check=quiet)
settings.register_profile("ci", derandomize=True, suppress_health_check=quiet)
_FIXED = bool(os.environ.get("CI") or os.environ.get("ROLLPACKER_FIXED_EXAMPLES"))
settings.load_profile("ci" if _FIXED else "here")

_ORDER = (
    *("core", "config", "report", "data", "examples", "endpoints", "processes", "sandbox"),
    *("rewards", "cli", "controller", "trainer", "rollout"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The pure and quick folders before those that need a model."""

    def rank(item: pytest.Item) -> int:
        folder = item.path.parent.name
        return _ORDER.index(folder) if folder in _ORDER else len(_ORDER)

    items.sort(key=rank)
