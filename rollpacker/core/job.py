"""Placeholder, replaced below."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class TailBatchingConfig:
    """Over-start, keep the first to finish, gather the stragglers (`tail_batching.*`)."""

    enabled: bool = True
    prompt_factor: float = 1.25
    """eta_p: a short round launches ceil(prompt_factor * P0) prompts."""
    sample_factor: float = 1.25
    """eta_r: ... with ceil(sample_factor * R0) samples each."""
    race: Literal["generated", "scored"] = "generated"
    """What counts as finishing first. "scored" is what the published code does."""
    flush_each_epoch: bool = True
    """Empty the long queue at the end of every epoch, not only at the end of the run."""

    def __post_init__(self) -> None:
        for name in ("prompt_factor", "sample_factor"):
            value = getattr(self, name)
            if not (math.isfinite(value) and 1 <= value <= 16):
                raise ValueError(f"{name} must lie between 1 and 16, not {value}")
