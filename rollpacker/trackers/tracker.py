"""The settings of a run's trackers (`trackers`). No tracking library is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rollpacker.bounds import check_at_least

TrackerName = Literal["wandb", "mlflow", "trackio", "swanlab"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerConfig:
    """Settings of one tracker (`trackers[]`); a name alone, as in `[wandb]`, means the defaults."""

    name: TrackerName
    project: str | None = None
    """Name of the project in the tracking library. None: `rollpacker`."""
    run_name: str | None = None
    """Name of the run in the tracking library. None: the run's own name."""
    samples_every_steps: int | None = 10
    """Steps between two tables of samples; step 1 has one too. None: no table is sent."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments for the library's call that opens a run, such as `entity` or `tags`."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "samples_every_steps")
