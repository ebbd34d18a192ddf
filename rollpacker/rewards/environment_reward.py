"""The built-in reward `environment`: the sum of the rewards that the environment gave the turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollpacker.core.checks.deadlines import AdaptiveDeadlineConfig
from rollpacker.rewards.reward import Failed, RewardConfig, RewardInput, Scored
from rollpacker.rewards.shared import Shared


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentRewardConfig:
    """The arguments of the reward `environment`: there are none."""


class EnvironmentReward:
    """Gives each sample the sum of the environment's rewards for its turns, where a turn without a
    reward counts 0. An episode that a limit ended counts too; a failed one is not judged."""

    DEADLINE: AdaptiveDeadlineConfig | None = None
    WORKERS: int | None = None
    """Most checks at a time. None: any number, since this reward waits for nothing."""

    def __init__(
        self, config: EnvironmentRewardConfig, *, entry: RewardConfig, name: str, shared: Shared
    ) -> None:
        self.name = name

    def check(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Accept any rows without looking at them; see `RewardPart.check`."""

    async def open(self) -> None:
        """Do nothing: there is nothing to open. See `RewardPart.open`."""

    async def score(
        self, samples: Sequence[RewardInput], *, timeout_s: float | None = None
    ) -> list[Scored | Failed | None]:
        """Return one verdict per sample (None: it had no episode); see `RewardPart.score`."""
        return [self._one(sample) for sample in samples]

    def _one(self, sample: RewardInput) -> Scored | None:
        if sample.episode is None:  # tried out before there is any
            return None
        turns = tuple(reward or 0.0 for reward in sample.episode.rewards)
        return Scored(value=sum(turns), turns=turns, seconds=0.0)

    def outage(self) -> str | None:
        """Return None, since no service is needed; see `RewardPart.outage`."""
        return None

    async def close(self) -> None:
        """Do nothing: there is nothing to close. See `RewardPart.close`."""
