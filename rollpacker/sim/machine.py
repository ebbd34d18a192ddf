"""The machine (devices, their speed, and delays) that a run is simulated on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollpacker.pipeline.sim.phase import Pipeline
from rollpacker.sim.drafts import Drafts, Speculation
from rollpacker.sim.latency import LatencyModel
from rollpacker.sim.recorded_checks import RecordedChecks

MIGRATION_S = 3.0
"""Seconds from the moment engines release devices until these can train: the upper bound of the
RollPacker paper, section 4.4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The simulated devices: their number and speed, and all delays that are not drawn."""

    latency: LatencyModel
    gpus: int
    """Number of devices that generate responses."""
    train_gpus: int | None = None
    """Number of devices that only train. None: the devices that generate train as well."""
    prompt_tokens: int
    max_running: int | None = None
    """Most sequences that one engine decodes at once. None: as many as its cache holds."""
    speculation: Speculation | None = None
    drafts: Drafts | None = None
    migration_s: float = MIGRATION_S
    """Seconds from the release of engines until the trainer can use their devices."""
    resize_s: float = 0.0
    """Seconds until engines with a new tensor-parallel degree have started."""
    check_slowdown: Mapping[str, float] = field(default_factory=dict)
    """Mapping from a source of prompts to the factor by which its checks take longer than the
    workload says; 1 if missing."""
    pipeline: Pipeline | None = None
    """The trainer's pipeline stages. None: a step's work is shared out evenly over its devices."""
    checks: RecordedChecks | None = None
    """Verdicts and durations of a recorded run's checks. None: the workload draws them."""
    keep_rows: bool = True
    """Whether engines keep a sample's KV cache while its environment answers. False: it is lost."""
    carries_turns: bool = False
    """Whether trajectories of prompts put off to a later round keep the tokens generated so far."""
    mismatch: float = 0.0
    """Chance, per weight update, that a token kept from an earlier launch comes out differently."""

    @property
    def trainer_gpus(self) -> int:
        """Number of devices that train, including devices that also generate."""
        return self.gpus if self.train_gpus is None else self.train_gpus
