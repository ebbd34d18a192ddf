"""Turns with an environment: what they are limited to, and when each act starts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from rollpacker.codec import absent
from rollpacker.core.checks.schedule import KindConfig, Order, Schedule
from rollpacker.core.commands import Act, Command
from rollpacker.core.events import Acted
from rollpacker.core.fleet.kept_rows import KeptRows
from rollpacker.core.ids import SampleId


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
    """True if the same messages bring the same answers, so that a lost episode is played again.
    False: the sample of a lost episode has failed."""
    order: Order = "longest"
    """Order in which samples act where no more may act at a time; its values are those of
    `RewardScheduleConfig.order`."""
    max_retries: int = 1
    """How often a lost episode is played again before its sample has failed."""
    kinds: Mapping[str, KindConfig] = field(default_factory=dict)
    """Source of the prompt -> how many samples act at a time, and the deadline of an answer."""
    work_by_turn: bool = field(default=True, metadata=absent(False))
    """True: tokens that a trajectory carries are counted as work of the engine turn by turn. False:
    all of them at its launch, as in older logs."""
    leaves_pool: bool = field(default=True, metadata=absent(False))
    """A round whose samples all act for long leaves a rollout pool that it shares (`stay.py`).
    False: it stays, as in older logs."""

    def __post_init__(self) -> None:
        if self.max_retries < 0:
            raise ValueError(f"max_retries must not be negative, not {self.max_retries}")


@dataclass(slots=True)
class Retracing:
    """How far a trajectory has come out as its earlier launches left it. The core, who has the
    tokens, and reports each count so, and come to the same. Places are tokens from the prompt on,
    for all who leave out those that were given, too, as long as one does so everywhere."""

    carried: int = 0
    """Tokens that are left, the last one drawn."""
    kept: int | None = None
    """So many came out the same. None: none were left, or nobody has looked."""
    goes_on: bool = field(init=False)
    """All that was drawn here came out the same, and there is more."""

    def __post_init__(self) -> None:
        self.goes_on = self.carried > 0

    def drawn(self, start: int, num_tokens: int, num_kept: int | None) -> None:
        """A turn of so many tokens has ended, which began in place `start`, and of which so many
        came out the same. None: what stands before it is not as it was."""
        if not self.goes_on:
            return
        self.kept = (self.kept or 0) if num_kept is None else start + num_kept
        self.goes_on = num_kept == num_tokens and self.kept < self.carried

    def stopped(self, start: int, num_tokens: int, num_kept: int | None) -> bool:
        """Take in a turn that was stopped on its way; `num_kept` is None if nobody compared its
        tokens. Returns whether the tokens of this turn count. If not, the tokens that an earlier
        launch left still stand for it."""
        if num_kept is not None:
            self.drawn(start, num_tokens, num_kept)
        return num_tokens > 0 and not (self.goes_on and num_kept is None)


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
    """The environment, or whoever keeps what it is to be told once it has a worker, knows of it,
    and was not told that it is over."""
    replaces: tuple[SampleId, ...] = ()
    """See `Launch`; of one that is not launched yet."""
    retracing: Retracing = field(default_factory=Retracing)


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
        """Episodes of the round at hand, by sample."""
        self.kept = KeptRows()

    def begin_round(self) -> None:
        super().begin_round()
        self.episodes.clear()
        self.kept.begin_round()

    def _act(self, *, sample: SampleId, timeout_s: float | None, retry: int) -> Command:
        episode = self.episodes[sample]
        episode.is_open = True
        return Act(sample=sample, turn=episode.turns, timeout_s=timeout_s, retry=retry)
