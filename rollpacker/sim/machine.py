"""The machine that a run is simulated on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollpacker.pipeline.sim.phase import Pipeline
from rollpacker.sim.drafts import Drafts, Speculation
from rollpacker.sim.latency import LatencyModel
from rollpacker.sim.recorded_checks import RecordedChecks

MIGRATION_S = 3.0
"""Seconds of a release, which the RollPacker paper (section 4.4) gives as an upper bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Devices, their speed, and everything else of a machine that takes time in a simulation."""

    latency: LatencyModel
    gpus: int
    """Devices that generate."""
    train_gpus: int | None = None
    """Devices that only train. None: the trainer takes turns on the devices that generate."""
    prompt_tokens: int
    max_running: int | None = None
    """Sequences that one engine decodes at once. None: as many as its cache holds."""
    speculation: Speculation | None = None
    drafts: Drafts | None = None
    migration_s: float = MIGRATION_S
    """Seconds from a release until the trainer can use the devices."""
    resize_s: float = 0.0
    """Seconds until engines with a new tensor-parallel degree have started."""
    check_slowdown: Mapping[str, float] = field(default_factory=dict)
    """Factor for each source of prompts by which a check keeps its worker longer than the workload
    says."""
    pipeline: Pipeline | None = None
    """The trainer's stages; None: its work is shared out without a remainder."""
    checks: RecordedChecks | None = None
    """Recorded checks of a run, used instead of the workload's. None: checks are the workload's."""
    keep_rows: bool = True
    """Engines keep what they have of a sample while its environment answers."""
    carries_turns: bool = False
    """Deferred trajectories go on with the tokens that they had."""
    mismatch: float = 0.0
    """Chance per token and update that a token drawn before comes out differently under newer
    weights."""

    @property
    def trainer_gpus(self) -> int:
        """Devices that train, including devices that also generate."""
        return self.gpus if self.train_gpus is None else self.train_gpus
