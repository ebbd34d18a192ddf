"""`JobConfig`: those settings of a run that its scheduling code (`rollpacker/core`) reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollpacker.codec import OMIT_DEFAULT, from_plain, to_plain
from rollpacker.core.checks.acting import ActingConfig
from rollpacker.core.checks.reward_schedule import RewardScheduleConfig
from rollpacker.core.fleet.fleet import FleetConfig
from rollpacker.core.fleet.parallelism import ParallelismConfig
from rollpacker.core.fleet.stream_plan import DeviceLayout, StreamConfig
from rollpacker.core.job.cadence import Cadence
from rollpacker.core.rounds.dynamic_sampling import DynamicSamplingConfig
from rollpacker.core.rounds.tail_batching import TailBatchingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """Settings by which the core (`rollpacker/core`) schedules a run. Event logs hold them."""

    prompts_per_step: int
    samples_per_prompt: int
    max_steps: int | None
    """Maximum number of steps. Left-over prompts may add more. None: until the data ends."""
    max_response_tokens: int | None = None
    prompt_tokens: int = 0
    """Mean number of tokens of a prompt, by which the use of the key-value cache is estimated."""
    tail_batching: TailBatchingConfig = field(default_factory=TailBatchingConfig)
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    rewards: RewardScheduleConfig = field(default_factory=RewardScheduleConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    stream: StreamConfig = field(default_factory=StreamConfig)
    trainer_apart: bool = False
    """True if the trainer has devices of its own, and may work while the engines generate."""
    layouts: tuple[DeviceLayout, ...] = (DeviceLayout(),)
    """How engines and trainer share the devices: a layout for each degree of tensor parallelism."""
    max_retries: int = 2
    """Maximum number of replacements per prompt and round for samples that the engine failed on."""
    min_verdicts: int = 2
    """Least number of samples with a verdict of the rewards for a group (a prompt's samples) to be
    trained on, not dropped: 2 where the algorithm compares the samples of a prompt, else 1."""
    cadence: Cadence | None = field(default=None, metadata=OMIT_DEFAULT)
    """When checkpoints and evaluations are due. None: never; a simulation has neither, and a log
    from before this field does not say."""
    speculate: tuple[str, ...] = field(default=(), metadata=OMIT_DEFAULT)
    """Names of the kinds of round in which the engine decodes speculatively."""
    fleet: FleetConfig | None = field(default=None, metadata=OMIT_DEFAULT)
    """Engines that can be lost and replaced. None: a single engine that lives as long as the run
    (in older logs of simulations: any number of engines, of which the job knows nothing)."""
    max_trainer_losses: int | None = field(default=None, metadata=OMIT_DEFAULT)
    """Number of losses of the trainer's processes, without a committed step between them, that ends
    the run. None: the trainer lives as long as the run."""

    acting: ActingConfig | None = field(default=None, metadata=OMIT_DEFAULT)
    """Settings of turns with environments. None: every sample is a single response."""

    shares_pools: bool = field(default=False, metadata=OMIT_DEFAULT)
    """True if the job's devices belong to pools that other jobs use too
    (`core/job/pooled_job.py`)."""

    def __post_init__(self) -> None:
        if self.stream.enabled and self.tail_batching.debias != "none":
            raise ValueError(
                f"tail_batching.debias={self.tail_batching.debias} does not go with "
                "stream_trainer.enabled: a sample's weight is known when its round is over, and "
                "streaming trains on it before"
            )
        check_look_ahead(
            self.tail_batching, streams=self.stream.enabled, acts=self.acting is not None
        )
        if self.shares_pools and self.stream.enabled and not self.trainer_apart:
            raise ValueError(
                "stream_trainer.enabled does not go with shared pools where engines and trainer "
                "have the same devices: those of a round are another job's when training begins. "
                "Set stream_trainer.enabled=false, or give the trainer processes of its own "
                "(train.processes)"
            )

    @property
    def follows_carrying(self) -> bool:
        """Whether the job decides by what came of carried tokens (`tail_batching.carry: auto`).
        Where samples take turns with environments, it carries as with `exact`."""
        tail = self.tail_batching
        return tail.carries and tail.carry == "auto" and self.acting is None

    def layout(self, tensor_parallel: int) -> DeviceLayout:
        """Layout of the devices (how engines and trainer share them) for engines of
        `tensor_parallel` devices; the first layout if none is for this number."""
        found = (one for one in self.layouts if one.tensor_parallel == tensor_parallel)
        return next(found, self.layouts[0])

    def to_plain(self) -> dict[str, Any]:
        """The configuration as a mapping that JSON can hold."""
        return to_plain(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> JobConfig:
        """The configuration that `to_plain` wrote, also by way of JSON. Keys that an older log
        lacks get their defaults. Raises `TypeError` or `ValueError` for any other mapping."""
        return from_plain(cls, plain)


def check_look_ahead(tail: TailBatchingConfig, *, streams: bool, acts: bool) -> None:
    """Raises `ValueError` if prompts are to be begun early where others have the slots that stand
    empty (`streams`: the trainer), or where samples take turns with environments (`acts`)."""
    if tail.look_ahead and (streams or acts):
        other = "stream_trainer.enabled" if streams else "environments"
        raise ValueError(f"tail_batching.look_ahead does not go with {other} yet: leave one out")
