"""Tail batching, deadlines and the idle report for TRL's `GRPOTrainer`. docs/trl.md has the page.

from rollpacker.integrations.trl import rollout_function

rollout = rollout_function(dataset)
trainer = GRPOTrainer(
    ..., train_dataset=rollout.dataset, rollout_func=rollout, callbacks=[rollout]
)
"""

from importlib.metadata import version

from packaging.specifiers import SpecifierSet

from rollpacker.imports import require

SUPPORTED = ">=1.12,<1.17,!=1.15.*"
"""Supported versions of TRL, which the tests ran with. `rollout_func` is experimental, and the code
around it changes between versions. (1.15 cannot train on a CPU, so it was not tested.)"""


def check_version(found: str) -> None:
    """Raise `ValueError` if `found`, the installed version of TRL, is not supported."""
    if not SpecifierSet(SUPPORTED).contains(found):
        raise ValueError(
            f"rollpacker.integrations.trl works with trl {SUPPORTED}, and {found} is installed: "
            f"pip install 'trl{SUPPORTED}', or train with RollPacker itself (docs/migration.md)"
        )


# Before anything of TRL is imported, so that another version is a sentence and not a traceback.
require("trl", extra="trl", what="rollpacker.integrations.trl")
check_version(version("trl"))

from rollpacker.integrations.trl.rollout_function import (  # noqa: E402
    RolloutFunction,
    rollout_function,
)

__all__ = ["SUPPORTED", "RolloutFunction", "check_version", "rollout_function"]
