"""Schedule of reward checks: when each starts, in which order, and for how long it may run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rollpacker.bounds import check_at_least
from rollpacker.core.checks.schedule import KindConfig, Order, Schedule
from rollpacker.core.commands import CancelScore, Command, Score
from rollpacker.core.events import SampleScored
from rollpacker.core.ids import SampleId

RewardKindConfig = KindConfig
"""Settings of one kind of check: how many run at a time, and the deadline of a check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardScheduleConfig:
    """Settings of reward checks: when they start, in which order, how often they are repeated."""

    overlap: bool = True
    """Whether a response is checked while others are still generated. False: all responses of a
    round are checked together, when the last one is generated."""
    order: Order = "fifo"
    """Which check starts when a worker becomes free. "fifo": the oldest. "closest": one of the
    prompt that lacks the fewest verdicts, so that a round that needs only the first prompts with
    all verdicts is over sooner. "longest": the one that is expected to take longest, so that it
    does not end up last and alone. Expected is the longest check of the same prompt so far; before
    there is one, the mean of all checks. Among equals the longest response comes first."""
    cancel: bool = True
    """Whether running checks of samples that are no longer needed are ended to free workers."""
    max_retries: int = 1
    """How often a check whose worker or endpoint failed is repeated at most; then: no verdict."""
    kinds: Mapping[str, RewardKindConfig] = field(default_factory=dict)
    """Limits of checks, by their prompts' `source`. A source without limits is missing."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "max_retries")


class RewardSchedule(Schedule[SampleScored]):
    """Decides when reward checks start: by `Score` commands, which `SampleScored` events answer."""

    def __init__(self, config: RewardScheduleConfig) -> None:
        super().__init__(
            config.kinds,
            order=config.order,
            max_retries=config.max_retries,
            say=Score,
            is_right=_is_right,
        )
        self.config = config

    def drop(self, samples: Iterable[SampleId]) -> list[Command]:
        """Drops checks that are no longer needed. Returns the command that cancels running ones."""
        running = self.forget(samples)
        return [CancelScore(samples=tuple(running))] if running and self.config.cancel else []


def _is_right(event: SampleScored) -> bool:
    correct = event.correct
    if correct is None:
        correct = event.value is not None and event.value > 0
    return correct and not event.timed_out
