"""Turns with an environment: what they are limited to, and when each act starts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from rollpacker.core.commands import Act, Command
from rollpacker.core.events import Acted
from rollpacker.core.ids import SampleId
from rollpacker.core.kept_rows import KeptRows
from rollpacker.core.schedule import KindConfig, Order, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLimits:
    """Where a trajectory ends although its episode goes on. A message that ended by itself is
    always given to the environment, which may reward it; limits are looked at when the answer is
    there. None: no limit."""

    max_turns: int | None = None
    """Messages of the model."""
    max_trajectory_tokens: int | None = None
    """Sampled and given ones, without the prompt."""
    max_environment_s: float | None = None
    """Seconds of the environment in all. What a single answer may take is the deadline's: one that
    does not come is no end, but a failure."""

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_trajectory_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        seconds = self.max_environment_s
        if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"max_environment_s must be more than 0, not {seconds}")

    def reached(self, turns: int, tokens: int, environment_s: float) -> str:
        """The finish reason of a trajectory that has come so far; empty if it goes on."""
        if self.max_turns is not None and turns >= self.max_turns:
            return "turns"
        if self.max_trajectory_tokens is not None and tokens >= self.max_trajectory_tokens:
            return "tokens"
        if self.max_environment_s is not None and environment_s >= self.max_environment_s:
            return "environment_s"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActingConfig:
    """How samples act."""

    limits: TurnLimits = field(default_factory=TurnLimits)
    begins: bool = False
    """Environments say the prompt: an episode is begun before its sample is launched."""
    is_deterministic: bool = False
    """The same messages bring the same answers: a lost episode is played again. False: its sample
    has failed."""
    order: Order = "longest"
    """Who is next where so many act at a time as may; as of checks (`RewardScheduleConfig`)."""
    max_retries: int = 1
    """How often a lost episode is played again before its sample has failed."""
    kinds: Mapping[str, KindConfig] = field(default_factory=dict)
    """By the source of the prompt: how many act at a time, and the deadline of an answer."""

    def __post_init__(self) -> None:
        if self.max_retries < 0:
            raise ValueError(f"max_retries must not be negative, not {self.max_retries}")


@dataclass(slots=True)
class Episode:
    """A sample's life with its environment, in the round at hand."""

    turns: int = 0
    """Messages of the model."""
    tokens: int = 0
    """Up to the last one's end, given ones included."""
    given: int = 0
    """Tokens that stand behind it."""
    environment_s: float = 0.0
    acts: bool = False
    """The environment has its turn."""
    is_open: bool = False
    """The environment knows of it, and was not told that it is over."""
    replaces: tuple[SampleId, ...] = ()
    """See `Launch`; of one that is not launched yet."""


class Acting(Schedule[Acted]):
    """The acts of a run: said by `Act`, answered by `Acted`."""

    def __init__(self, config: ActingConfig) -> None:
        super().__init__(
            config.kinds,
            order=config.order,
            max_retries=config.max_retries if config.is_deterministic else 0,
            say=self._act,
            is_right=lambda event: True,
        )
        self.config = config
        self.episodes: dict[SampleId, Episode] = {}
        """Of the round at hand, by sample."""
        self.kept = KeptRows()

    def begin_round(self) -> None:
        super().begin_round()
        self.episodes.clear()
        self.kept.begin_round()

    def _act(self, *, sample: SampleId, timeout_s: float | None, retry: int) -> Command:
        episode = self.episodes[sample]
        episode.is_open = True
        return Act(sample=sample, turn=episode.turns, timeout_s=timeout_s, retry=retry)
