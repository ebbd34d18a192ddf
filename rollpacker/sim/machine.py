"""The machine that a run is simulated on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollpacker.pipeline.sim.phase import Pipeline
from rollpacker.sim.drafts import Drafts, Speculation
from rollpacker.sim.latency import LatencyModel
from rollpacker.sim.recorded_checks import RecordedChecks

MIGRATION_S = 3.0
"""Seconds until released devices can train: the upper bound of the RollPacker paper, section
4.4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Devices, their speed, and everything else of a machine that takes time in a simulation."""

    latency: LatencyModel
    gpus: int
    """Number of devices that generate."""
    train_gpus: int | None = None
    """Number of devices that only train. None: the devices that generate train as well."""
    prompt_tokens: int
    max_running: int | None = None
    """Most sequences that one engine decodes at once. None: as many as its cache holds."""
    speculation: Speculation | None = None
    drafts: Drafts | None = None
    migration_s: float = MIGRATION_S
    """Seconds from a release until the trainer can use the devices."""
    resize_s: float = 0.0
    """Seconds until engines with a new tensor-parallel degree have started."""
    check_slowdown: Mapping[str, float] = field(default_factory=dict)
    """Mapping from a source of prompts to the factor by which a check takes longer than the
    workload's seconds; 1 for a missing source."""
    pipeline: Pipeline | None = None
    """The trainer's stages; None: its work is shared out evenly over the devices."""
    checks: RecordedChecks | None = None
    """Recorded checks of a run, used instead of the workload's. None: checks are the workload's."""
    keep_rows: bool = True
    """Whether engines keep a sample in their cache while its environment answers."""
    carries_turns: bool = False
    """Whether trajectories of prompts put off to a later round keep their tokens."""
    mismatch: float = 0.0
    """Chance per token and weight update that a kept token comes out differently."""

    @property
    def trainer_gpus(self) -> int:
        """Number of devices that train, including devices that also generate."""
        return self.gpus if self.train_gpus is None else self.train_gpus
