"""What the core is told of a run's engines."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollpacker.codec import OMIT_DEFAULT, absent
from rollpacker.core.routing import Routing


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """Engines that can be lost, and replaced."""

    num_engines: int = 1
    routing: Routing = "spread"
    """How each sample is given its engine: `core/routing.py`."""
    max_losses: int = 3
    """So many losses of one engine without a committed step between them end the run."""
    losses_of_all: bool = field(default=False, metadata=absent(True))
    """Losses of all engines together count, as they did in older logs."""
    moves: bool = False
    """Samples under way may move to an engine that has joined, and from one that is released; the
    engines can go on with each other's tokens."""
    num_devices: int | None = field(default=None, metadata=OMIT_DEFAULT)
    """Devices that `num_engines` engines share at first, and others at another degree of tensor
    parallelism. None: the engines stay as they are."""

    def __post_init__(self) -> None:
        for name in ("num_engines", "max_losses"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.num_devices is not None and (
            self.num_devices < 1 or self.num_devices % self.num_engines
        ):
            raise ValueError(
                f"num_devices must be a multiple of num_engines ({self.num_engines}), not "
                f"{self.num_devices}"
            )
