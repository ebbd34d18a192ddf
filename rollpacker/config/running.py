"""Configuration that belongs to no single part: checks, evaluation, checkpoints, and deadlines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rollpacker.bounds import check_at_least, check_positive
from rollpacker.core.checks.reward_schedule import RewardKindConfig, RewardScheduleConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSchedulerConfig:
    """When each response is checked (`reward_scheduler.*`). How many checks run at once, and for
    how long, are settings of each reward."""

    overlap: bool = True
    """Whether to check a response while others are still generated. False: all responses of a round
    (one batch of generation) are checked together, after the last one."""
    order: Literal["auto", "fifo", "closest", "longest"] = "auto"
    """The check that a free worker takes next. fifo: the oldest. closest: one whose prompt lacks
    the fewest verdicts. longest: the one that is expected to take longest. auto: closest if a round
    keeps the samples that have a verdict first (`tail_batching.race=scored`), else longest."""
    cancel: bool = True
    """Whether to end running checks of samples that are not needed any more."""
    max_retries: int = 1
    """Number of times that a check is tried again after a worker or an endpoint failed. After that
    the sample has no verdict."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "max_retries")

    def schedule(self, race: str, kinds: Mapping[str, RewardKindConfig]) -> RewardScheduleConfig:
        """The scheduling core's config of checks. `race`, the value of `tail_batching.race`, says
        what order "auto" means. `kinds`: workers and deadline of checks by source of prompts."""
        order = self.order
        if order == "auto":
            order = "closest" if race == "scored" else "longest"
        return RewardScheduleConfig(
            overlap=self.overlap,
            order=order,
            cancel=self.cancel,
            max_retries=self.max_retries,
            kinds=kinds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """Evaluation on held-out prompts (`eval.*`)."""

    every_steps: int | None = 10
    """Steps between two evaluations. None: only before the first and after the last step."""
    samples_per_prompt: int = 1
    """Number of responses to each prompt. More than one gives pass@k besides pass@1, for k = 2, 4,
    8, ... below this number and for this number."""
    max_prompts: int | None = None
    temperature: float | None = None
    """Sampling temperature of evaluations. None: as in training. 0: greedy."""
    max_response_tokens: int | None = None
    """Most tokens of a response in evaluations. None: as in training."""
    pass_threshold: float = 1.0
    """Least reward with which a response counts as passed."""

    def __post_init__(self) -> None:
        off = (
            "null (only before the first and after the last step; data.eval=null with"
            " data.eval_fraction=0: never)"
        )
        check_at_least(self, 1, "every_steps", otherwise=off)
        check_at_least(self, 1, "samples_per_prompt", "max_prompts", "max_response_tokens")
        check_at_least(self, 0, "temperature")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written and how many are kept (`checkpoint.*`). One is always written
    after the last step and at a Ctrl-C."""

    every_steps: int = 10
    keep_last: int = 2

    def __post_init__(self) -> None:
        check_at_least(self, 1, "every_steps", "keep_last")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineConfig:
    """Longest wait, in seconds, for each kind of work without a sign of life (`deadlines.*`). A
    longer wait stops the run, which can be resumed, and the message names what was waited for."""

    generation_s: float = 600.0
    reward_s: float = 600.0
    train_s: float = 1800.0
    sync_s: float = 300.0
    checkpoint_s: float = 600.0
    heartbeat_s: float = 5.0
    """Seconds without an answer after which a process counts as lost and is started anew: an
    engine's own process, a process that checks responses (`rewards_hosts`), and with `runtime: ray`
    another host, with all of the run's processes there. An engine also counts as lost if it makes
    no progress for twelve times as long while others make some."""
    start_s: float = 600.0
    """Within so many seconds an engine's process must have loaded its model, and each of the
    trainer's processes its libraries. A large model from a slow disk, or vLLM's first compilation,
    may need more."""

    def __post_init__(self) -> None:
        check_positive(self, *self.__slots__)
