"""The part of a scenario that describes the optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

from rollpacker.bounds import check_at_least
from rollpacker.pipeline.sim.spec import PipelineSpec
from rollpacker.sim.scenario_checks import check_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSpec:
    """How the optimizer step is simulated (`train.*`)."""

    tensor_parallel: int = 1
    """Number of GPUs that share each layer; it does not change a step's time. Times
    `pipeline_parallel` and `context_parallel` it gives the GPUs of a replica, released together."""
    pipeline_parallel: int = 1
    """Number of pipeline stages that divide the layers. It is used only to count a replica's GPUs,
    and has no effect on a step's time; see `pipeline`."""
    context_parallel: int = 1
    """Number of GPUs that share each sequence. It is used only to count a replica's GPUs."""
    fixed_s: float | None = None
    """Seconds of a step that do not depend on its tokens. None: estimated from the model's size."""
    pipeline: PipelineSpec | None = None
    """Pipeline stages to simulate one by one. None: the work of a step is shared out evenly over
    the GPUs, and no stage waits."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "tensor_parallel", "pipeline_parallel", "context_parallel")
        check_seconds("fixed_s", self.fixed_s)

    @property
    def replica_gpus(self) -> int:
        """Number of GPUs of one data-parallel replica."""
        return self.tensor_parallel * self.stages * self.context_parallel

    @property
    def stages(self) -> int:
        return self.pipeline_parallel if self.pipeline is None else self.pipeline.stages
