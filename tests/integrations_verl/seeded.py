"""verl's own agent loops with a seed for each response, which verl itself does not give: that of
the prompt's row in the data and the response's place, as the scheduler gives it where the data are
not shuffled. Without it no two runs could be compared response by response. Nothing else is
changed."""

from __future__ import annotations

from typing import Any

import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from rollpacker.core.ids import PromptId, SampleId
from rollpacker.engines.engine import sample_key
from rollpacker.scheduler.scheduler import SOURCE


def seed_of(run: int, row: int, place: int) -> int:
    """Seed of a response to the data's prompt of that row, in a run with the seed `run`."""
    return sample_key(run, SampleId(PromptId(SOURCE, 0, row), place, 0)) >> 1


class Worker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):  # type: ignore[misc]
    async def _run_agent_loop(
        self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **kwargs: Any
    ) -> Any:
        if not trajectory["validate"]:
            run = self.config.actor_rollout_ref.rollout.seed
            seed = seed_of(run, int(kwargs["index"]), kwargs["session_id"])
            sampling_params = {**sampling_params, "seed": seed}
        return await super()._run_agent_loop(sampling_params, trajectory, **kwargs)


class Manager(AgentLoopManagerTQ):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(Worker)
