"""What a run is simulated on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollpacker.pipeline.sim.phase import Pipeline
from rollpacker.sim.drafts import Drafts, Speculation
from rollpacker.sim.latency import LatencyModel
from rollpacker.sim.recorded_checks import RecordedChecks

MIGRATION_S = 3.0
"""At most this, says the RollPacker paper, section 4.4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the run is simulated on."""

    latency: LatencyModel
    gpus: int
    """That generate."""
    train_gpus: int | None = None
    """Of the trainer alone; None: it has those that generate, in turn."""
    prompt_tokens: int
    max_running: int | None = None
    """Sequences that one engine decodes at once."""
    speculation: Speculation | None = None
    drafts: Drafts | None = None
    migration_s: float = MIGRATION_S
    """From a release to the moment when the trainer can use the devices."""
    resize_s: float = 0.0
    """Until engines of another degree are there, where the core lays them out anew."""
    check_slowdown: Mapping[str, float] = field(default_factory=dict)
    """By source of the prompt: how much longer a check keeps its worker than the workload says."""
    pipeline: Pipeline | None = None
    """The trainer's stages; None: its work is shared out without a remainder."""
    checks: RecordedChecks | None = None
    """Of a run; instead of what the workload says of them."""
    keep_rows: bool = True
    """Engines keep what they have of a sample while its environment answers."""
    carries_turns: bool = False
    """Deferred trajectories take up what they had."""
    mismatch: float = 0.0
    """Chance per token and update that a token drawn before comes out differently under newer
    weights."""

    @property
    def trainer_gpus(self) -> int:
        """That train, whoever else has them."""
        return self.gpus if self.train_gpus is None else self.train_gpus
