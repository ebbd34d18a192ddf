"""Settings of generation (`rollout.*`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from rollpacker.bounds import check_at_least, check_within
from rollpacker.core.fleet.fleet import FleetConfig
from rollpacker.core.fleet.parallelism import ParallelismConfig
from rollpacker.core.fleet.routing import Routing
from rollpacker.core.rounds.dynamic_sampling import DynamicSamplingConfig
from rollpacker.engines.engine import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """How responses are generated (`rollout.*`)."""

    prompts_per_step: int
    """P0: number of prompts that each optimizer step trains on."""
    samples_per_prompt: int
    """R0: number of responses to each prompt; the group size of GRPO. 1 is for algorithms that do
    not compare the samples of a prompt."""
    max_response_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    """Share of probability that sampling keeps, of the most probable tokens; 1: all. Training uses
    log-probs of the whole distribution, so top_p or top_k makes its gradient a little different."""
    top_k: int = 0
    """Number of most probable tokens that sampling keeps. 0: all."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, besides the model's end tokens."""
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    engines: int = 1
    """Number of engines. 1: the engine is in the run's own process. More: each engine has a process
    of its own, on a device of its own or, on a CPU, with its share of `train.threads`; a lost one
    is replaced while others go on. With `parallelism_planner`, the number at its `initial`
    degree."""
    routing: Routing = "spread"
    """How several engines share samples. spread: each sample goes to the engine with the least
    work. group: the samples of a prompt go to one engine, so that its prefill is made once, unless
    that engine has much more work than others. turns: engines get samples in turn."""

    weights_carrier: Literal["auto", "host", "broadcast", "ipc"] = "auto"
    """How new weights come to engines in processes of their own (docs: Engines). host: through host
    memory. broadcast: from the trainer's processes, by gloo or NCCL. ipc: on one machine without
    GPUs, from the trainer's processes through shared memory. auto: broadcast on the GPUs of one
    machine; ipc without GPUs from several processes of the trainer; else host."""

    def __post_init__(self) -> None:
        counts = ("prompts_per_step", "samples_per_prompt", "max_response_tokens", "engines")
        check_at_least(self, 1, *counts)
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(
                "temperature must be more than 0: greedy responses of one prompt are all the same"
            )
        check_within(self, "(0, 1]", "top_p")
        check_at_least(self, 0, "top_k")

    @property
    def max_slots(self) -> int | None:
        """Most samples that all engines together decode at once. None: no limit."""
        slots = self.engine.max_slots
        return None if slots is None else slots * self.engines

    @property
    def is_repeatable(self) -> bool:
        """Whether two runs with this config generate the same tokens, bit for bit, as they do with
        one engine, embedded in the run's process (`rollout.engine.name=torch`)."""
        return self.engines == 1 and self.engine.name == "torch"

    def fleet(self, parallelism: ParallelismConfig) -> FleetConfig:
        """The scheduling core's config of the run's engines: their number, which engine gets a
        sample, and whether their number of devices may change."""
        moves = self.engine.takes_up_carried
        return FleetConfig(
            num_engines=self.engines,
            routing=self.routing,
            moves=moves,
            num_devices=self.engines * parallelism.initial if parallelism.enabled else None,
        )
