"""The part of a scenario that describes the optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

from rollpacker.pipeline.sim.spec import PipelineSpec
from rollpacker.sim.scenario_checks import at_least_one, check_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSpec:
    """The optimizer step (`train.*`)."""

    tensor_parallel: int = 1
    """The three degrees together are the GPUs of a replica, which are released together; they have
    no price of their own."""
    pipeline_parallel: int = 1
    """See `tensor_parallel`."""
    context_parallel: int = 1
    """See `tensor_parallel`."""
    fixed_s: float | None = None
    """Seconds of a step that do not depend on its tokens; None: a power law of the parameters."""
    pipeline: PipelineSpec | None = None
    """None: the work of a step is shared out over the GPUs without a remainder."""

    def __post_init__(self) -> None:
        at_least_one(self, "tensor_parallel", "pipeline_parallel", "context_parallel")
        check_seconds("fixed_s", self.fixed_s)

    @property
    def replica_gpus(self) -> int:
        """GPUs of one data-parallel replica."""
        return self.tensor_parallel * self.stages * self.context_parallel

    @property
    def stages(self) -> int:
        return self.pipeline_parallel if self.pipeline is None else self.pipeline.stages
