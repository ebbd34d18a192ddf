"""RollPacker: on-policy RL post-training that does not wait for the longest response.

import rollpacker
run = rollpacker.train("configs/quickstart.yaml", overrides=["train.steps=20"])
print(run, run.metrics["critic/rewards/mean"], run.model)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollpacker.callbacks import Callback, RunningRun
    from rollpacker.run.train import train
    from rollpacker.run.view import Run

__all__ = ["Callback", "Run", "RunningRun", "train"]

_PLACES = {
    "Callback": "rollpacker.callbacks",
    "Run": "rollpacker.run.view",
    "RunningRun": "rollpacker.callbacks",
    "train": "rollpacker.run.train",
}


def __getattr__(name: str) -> Any:
    """Load a name of the API at its first use, so that an import of any submodule stays light."""
    if name in _PLACES:
        import importlib

        return getattr(importlib.import_module(_PLACES[name]), name)
    if name == "__version__":
        from importlib.metadata import version

        return version("rollpacker")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, "__version__"])
