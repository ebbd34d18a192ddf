"""RollPacker: on-policy RL post-training that does not wait for the longest response.

import rollpacker
run = rollpacker.train("configs/quickstart.yaml", overrides=["train.steps=20"])
print(run.summary, run.model)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollpacker.cli.training import FinishedRun, train

__all__ = ["FinishedRun", "train"]


def __getattr__(name: str) -> Any:
    """The API is loaded at first use, so that importing any part of the package stays light."""
    if name in __all__:
        import importlib

        return getattr(importlib.import_module("rollpacker.cli.training"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
