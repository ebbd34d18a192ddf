"""Tail batching in verl's V1 trainer: `trainer.v1.trainer_mode=rollpacker_sync`. docs/verl.md has
the page. verl imports this package by itself (the entry point `verl.plugins`), which registers it.
"""

from importlib.metadata import version

from rollpacker.imports import require

SUPPORTED = "0.9.1"
"""The supported version of verl. Its hooks are not documented as stable, and move between
versions."""


def check_version(found: str) -> None:
    """Raise `ValueError` if `found`, the installed version of verl, is not supported."""
    if found != SUPPORTED:
        raise ValueError(
            f"rollpacker.integrations.verl works with verl {SUPPORTED}, and {found} is installed: "
            f"pip install 'verl=={SUPPORTED}', or leave out trainer_mode=rollpacker_sync"
        )


# Before anything of verl is imported, so that another version is a sentence and not a traceback.
require("verl", extra="verl", what="rollpacker.integrations.verl")
check_version(version("verl"))

from rollpacker.integrations.verl.trainer import RollPackerTrainer  # noqa: E402

__all__ = ["SUPPORTED", "RollPackerTrainer", "check_version"]
