"""The built-in reward `environment`: what the environment said of each turn, added up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollpacker.core.checks.deadlines import AdaptiveDeadlineConfig
from rollpacker.rewards.reward import Failed, RewardConfig, RewardInput, Scored
from rollpacker.rewards.shared import Shared


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentRewardConfig:
    """The reward takes no `arguments`."""


class EnvironmentReward:
    """A turn without a reward counts as none, and so does an episode that a limit ended before the
    environment said any. An episode that was lost has no verdict: it never comes here."""

    DEADLINE: AdaptiveDeadlineConfig | None = None
    WORKERS: int | None = None
    """No limit of checks at a time: this reward waits for nobody."""

    def __init__(
        self, config: EnvironmentRewardConfig, *, entry: RewardConfig, name: str, shared: Shared
    ) -> None:
        self.name = name

    def check(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """See `RewardPart`. Any row will do."""

    async def open(self) -> None:
        """See `RewardPart`."""

    async def score(
        self, samples: Sequence[RewardInput], *, timeout_s: float | None = None
    ) -> list[Scored | Failed | None]:
        """See `RewardPart`."""
        return [self._one(sample) for sample in samples]

    def _one(self, sample: RewardInput) -> Scored | None:
        if sample.episode is None:  # tried out before there is any
            return None
        turns = tuple(reward or 0.0 for reward in sample.episode.rewards)
        return Scored(value=sum(turns), turns=turns, seconds=0.0)

    def outage(self) -> str | None:
        """See `RewardPart`."""
        return None

    async def close(self) -> None:
        """See `RewardPart`."""
