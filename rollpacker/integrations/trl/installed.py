"""Whether the TRL that is installed is one that `rollpacker.integrations.trl` was tried with.

Imported before anything of TRL, so that another version is a sentence instead of a traceback.
"""

from __future__ import annotations

from importlib.metadata import version

from packaging.specifiers import SpecifierSet

from rollpacker.imports import require

SUPPORTED = ">=1.12,<1.17,!=1.15.*"
"""TRL's `rollout_func` is experimental, and what happens around it changes between versions: only
those that the tests ran with are taken. (1.15 cannot train on a CPU, so they did not.)"""


def check_version(found: str) -> None:
    """Raises `ValueError` for a version of TRL that nobody has tried."""
    if not SpecifierSet(SUPPORTED).contains(found):
        raise ValueError(
            f"rollpacker.integrations.trl works with trl {SUPPORTED}, and {found} is installed: "
            f"pip install 'trl{SUPPORTED}', or train with RollPacker itself (docs/migration.md)"
        )


require("trl", extra="trl", what="rollpacker.integrations.trl")
check_version(version("trl"))
