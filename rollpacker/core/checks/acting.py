"""Turns of samples with environments: the limits of a trajectory, and when each answer starts."""

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
    """Limits at which a trajectory ends although its episode goes on. A message that ended by
    itself is always given to the environment, which may reward it; limits are checked when the
    answer is there. None: no limit."""

    max_turns: int | None = None
    """Most messages of the model. None: no limit."""
    max_trajectory_tokens: int | None = None
    """Most tokens, of the model and the environment, without the prompt. None: no limit."""
    max_environment_s: float | None = None
    """Most seconds of the environment in all. None: no limit. A single answer has a deadline of its
    own, and one that does not come is a failure, not an end."""

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_trajectory_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        seconds = self.max_environment_s
        if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"max_environment_s must be more than 0, not {seconds}")

    def reached(self, turns: int, tokens: int, environment_s: float) -> str:
        """Finish reason if a trajectory with these counts has reached a limit; empty if it has
        not."""
        if self.max_turns is not None and turns >= self.max_turns:
            return "turns"
        if self.max_trajectory_tokens is not None and tokens >= self.max_trajectory_tokens:
            return "tokens"
        if self.max_environment_s is not None and environment_s >= self.max_environment_s:
            return "environment_s"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActingConfig:
    """How samples take turns with environments."""

    limits: TurnLimits = field(default_factory=TurnLimits)
    begins: bool = False
    """Whether environments give the prompt, so that an episode begins before its sample does."""
    is_deterministic: bool = False
    """True if the same messages bring the same answers, so that a lost episode is played again.
    False: the sample of a lost episode has failed."""
    order: Order = "longest"
    """Order in which waiting samples get an answer, where the number at a time is bounded; its
    values are those of `RewardScheduleConfig.order`."""
    max_retries: int = 1
    """How often a lost episode is played again before its sample has failed."""
    kinds: Mapping[str, KindConfig] = field(default_factory=dict)
    """How many samples act at a time, and the deadline of an answer, by source of prompts."""
    work_by_turn: bool = field(default=True, metadata=absent(False))
    """True: tokens that a trajectory carries are counted as work of the engine turn by turn. False:
    all of them at its launch, as in older logs."""
    leaves_pool: bool = field(default=True, metadata=absent(False))
    """Whether a round whose samples are all with environments for long leaves a rollout pool that
    other jobs share (`stay.py`). False: it stays, as in older logs."""

    def __post_init__(self) -> None:
        if self.max_retries < 0:
            raise ValueError(f"max_retries must not be negative, not {self.max_retries}")


@dataclass(slots=True)
class Retracing:
    """How far a trajectory has come out as an earlier launch of its prompt left it. Kept both by
    the core and by the side that has the tokens, with the same result. Positions count tokens after
    the prompt, with or without those that the environment gave, as long as all do so alike."""

    carried: int = 0
    """Number of tokens that an earlier launch of the prompt left, up to the last sampled one."""
    kept: int | None = None
    """Number of the carried tokens that came out the same. None: none were left or compared yet."""
    goes_on: bool = field(init=False)
    """True if all tokens sampled so far came out the same, and more are left to compare."""

    def __post_init__(self) -> None:
        self.goes_on = self.carried > 0

    def drawn(self, start: int, num_tokens: int, num_kept: int | None) -> None:
        """Records a turn that has ended: its number of tokens, the position where it began, and
        how many of its tokens came out the same. None: tokens before it differ already."""
        if not self.goes_on:
            return
        self.kept = (self.kept or 0) if num_kept is None else start + num_kept
        self.goes_on = num_kept == num_tokens and self.kept < self.carried

    def stopped(self, start: int, num_tokens: int, num_kept: int | None) -> bool:
        """Records a turn that was stopped before its end; `num_kept` is None if its tokens were not
        compared. Returns whether the tokens of this turn count. If not, those that an earlier
        launch left still stand for the turn."""
        if num_kept is not None:
            self.drawn(start, num_tokens, num_kept)
        return num_tokens > 0 and not (self.goes_on and num_kept is None)


@dataclass(slots=True)
class Episode:
    """A sample's life with its environment, in the round at hand."""

    turns: int = 0
    """Number of messages of the model so far."""
    tokens: int = 0
    """Number of tokens up to the end of the model's last message, the environment's included."""
    given: int = 0
    """Number of tokens that the environment gave after the model's last message."""
    environment_s: float = 0.0
    acts: bool = False
    """True while the environment has the turn."""
    is_open: bool = False
    """True while the environment, or the queue before it, has the episode and it was not ended."""
    replaces: tuple[SampleId, ...] = ()
    """Failed sample whose noise this one uses, as in `Launch.replaces`; empty if there is none."""
    retracing: Retracing = field(default_factory=Retracing)


class Acting(Schedule[Acted]):
    """The turns of environments in a run: started by `Act`, answered by `Acted`."""

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
