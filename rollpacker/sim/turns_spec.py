"""The part of a scenario that describes turns with environments (`turns.*`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollpacker.core.checks.acting import ActingConfig, TurnLimits
from rollpacker.core.checks.deadlines import AdaptiveDeadlineConfig
from rollpacker.core.checks.schedule import KindConfig
from rollpacker.sim.scenario_checks import MAX_SECONDS, at_least_one, check_quantiles


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnsSpec:
    """Samples are trajectories: messages of the model, and answers of an environment (`turns.*`).
    The scenario's lengths are then those of a message. Each key with quantiles is drawn by sample,
    the logarithm linear between them; beyond both ends it stays."""

    messages_quantiles: Mapping[float, int]
    """Messages of a trajectory that nothing cuts short; the answer to the last one ends it."""
    given_tokens_quantiles: Mapping[float, int]
    """Tokens that an answer gives to the model."""
    seconds_quantiles: Mapping[float, float]
    """Seconds of the environment for an answer."""
    max_tokens: int
    """Tokens of a trajectory at most, sampled and given ones, without the prompt."""
    max_turns: int | None = None
    """Messages of a trajectory; None: no limit."""
    workers: int | None = None
    """Environments that answer at the same time, of each kind of prompts; None: no bound."""
    deadline: AdaptiveDeadlineConfig = field(
        default_factory=lambda: AdaptiveDeadlineConfig(min_s=60.0, factor=2.0, max_s=600.0)
    )
    """Deadline of an answer; the slowest so far says how long others may take. Its default is more
    patient than that of checks: what is lost is a trajectory, not one verdict."""
    deterministic: bool = False
    """An environment that is lost is played again. False: its sample has failed."""
    keep_rows: bool = True
    """A trajectory stays in its engine's cache while the environment answers, and takes no room
    there. False: it is computed anew for each turn."""

    def __post_init__(self) -> None:
        at_least_one(self, "max_tokens")
        for name in ("max_turns", "workers"):
            if getattr(self, name) is not None:
                at_least_one(self, name)
        for name in ("messages_quantiles", "given_tokens_quantiles"):
            check_quantiles(name, getattr(self, name), smallest=1)
        check_quantiles(
            "seconds_quantiles", self.seconds_quantiles, smallest=0, largest=MAX_SECONDS
        )

    def acting(self, kinds: tuple[str, ...]) -> ActingConfig:
        """The core's configuration of turns, for prompts of these sources."""
        kind = KindConfig(workers=self.workers, deadline=self.deadline)
        return ActingConfig(
            limits=TurnLimits(max_turns=self.max_turns, max_trajectory_tokens=self.max_tokens),
            is_deterministic=self.deterministic,
            kinds=dict.fromkeys(kinds, kind),
        )
