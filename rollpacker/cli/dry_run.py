"""`rollpacker train CONFIG --dry-run`: what a run would do and need, before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollpacker.config.schema import RunConfig


def print_dry_run(config: RunConfig) -> None:
    """Batch arithmetic and memory of one step, on stdout."""
    from rollpacker.trainer.estimate import estimate

    print(f"{config.name}: {config.model.path}")
    for line in estimate(config).lines():
        print(f"  {line}")
    if config.without_effect is not None:
        print(f"  {config.without_effect}")
