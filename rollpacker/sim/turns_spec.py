"""The part of a scenario that describes turns with environments (`turns.*`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollpacker.bounds import check_at_least
from rollpacker.core.checks.acting import ActingConfig, TurnLimits
from rollpacker.core.checks.deadlines import AdaptiveDeadlineConfig
from rollpacker.core.checks.schedule import KindConfig
from rollpacker.sim.scenario_checks import MAX_SECONDS, check_quantiles


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnsSpec:
    """How samples take turns with environments (`turns.*`): a sample is then a trajectory of the
    model's messages and the environment's answers, and the scenario's lengths are those of
    messages. Between quantiles the logarithm of a value is linear, beyond them it is constant."""

    messages_quantiles: Mapping[float, int]
    """Mapping from quantile to the number of messages of a trajectory that no limit cuts short."""
    given_tokens_quantiles: Mapping[float, int]
    """Mapping from quantile to the number of tokens of an environment's answer."""
    seconds_quantiles: Mapping[float, float]
    """Mapping from quantile to the seconds that an environment takes for an answer."""
    max_tokens: int
    """Most tokens of a trajectory, messages and answers together, without the prompt."""
    max_turns: int | None = None
    """Most messages of a trajectory; None: no limit."""
    workers: int | None = None
    """Most environments that answer at once, for each source of prompts; None: no limit."""
    deadline: AdaptiveDeadlineConfig = field(
        default_factory=lambda: AdaptiveDeadlineConfig(min_s=60.0, factor=2.0, max_s=600.0)
    )
    """Time limit of an environment's answer, which adapts to the slowest answer so far. The default
    allows more time than for checks, since a missed limit loses a whole trajectory."""
    deterministic: bool = False
    """Whether a trajectory whose environment's process is lost goes on in a new process, in which
    all its turns are played again. False: its sample fails."""
    keep_rows: bool = True
    """Whether a trajectory's KV cache stays in its engine while the environment answers, in room
    that is taken to be free for others. False: the cache is computed anew for each turn."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "max_tokens", "max_turns", "workers")
        for name in ("messages_quantiles", "given_tokens_quantiles"):
            check_quantiles(name, getattr(self, name), smallest=1)
        check_quantiles(
            "seconds_quantiles", self.seconds_quantiles, smallest=0, largest=MAX_SECONDS
        )

    def acting(self, kinds: tuple[str, ...]) -> ActingConfig:
        """The scheduling core's configuration of turns. `kinds`: all sources of prompts, each of
        which gets the same workers and deadline."""
        kind = KindConfig(workers=self.workers, deadline=self.deadline)
        return ActingConfig(
            limits=TurnLimits(max_turns=self.max_turns, max_trajectory_tokens=self.max_tokens),
            is_deterministic=self.deterministic,
            kinds=dict.fromkeys(kinds, kind),
        )
