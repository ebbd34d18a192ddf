"""How samples take turns with environments: limits of a trajectory, when environments answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollpacker.bounds import check_at_least, check_positive
from rollpacker.codec import absent
from rollpacker.core.checks.schedule import KindConfig, Order, Schedule
from rollpacker.core.commands import Act, Command
from rollpacker.core.events import Acted
from rollpacker.core.fleet.kept_rows import KeptRows
from rollpacker.core.ids import SampleId


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLimits:
    """Limits at which a trajectory ends although its episode goes on. A message that ended by
    itself is always given to the environment, which may reward it; limits are checked after the
    environment's answer. None: no limit."""

    max_turns: int | None = None
    """Maximum number of messages of the model in a trajectory. None: no limit."""
    max_trajectory_tokens: int | None = None
    """Limit on the tokens of a trajectory, without its prompt's. None: no limit."""
    max_environment_s: float | None = None
    """Limit on the seconds that an environment takes for all answers of a trajectory. None: no
    limit. Each answer has a deadline besides; if one is too late, the sample has failed."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "max_turns", "max_trajectory_tokens")
        check_positive(self, "max_environment_s")

    def reached(self, turns: int, tokens: int, environment_s: float) -> str:
        """Finish reason if a trajectory with these counts is at a limit; empty if it is not."""
        if self.max_turns is not None and turns >= self.max_turns:
            return "turns"
        if self.max_trajectory_tokens is not None and tokens >= self.max_trajectory_tokens:
            return "tokens"
        if self.max_environment_s is not None and environment_s >= self.max_environment_s:
            return "environment_s"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActingConfig:
    """Settings of a run whose samples take turns with environments (`JobConfig.acting`)."""

    limits: TurnLimits = field(default_factory=TurnLimits)
    begins: bool = False
    """True if environments write the prompts: an episode then begins before its sample's launch."""
    is_deterministic: bool = False
    """True if the same messages bring the same answers, so that an episode is played again if its
    environment's process was lost. False: the sample has then failed."""
    order: Order = "longest"
    """Which waiting sample's environment is asked next, where the number at a time is bounded.
    "fifo": that of the oldest sample. "closest": one of the prompt that lacks the fewest samples.
    "longest": the one that is expected to take longest, as in `RewardScheduleConfig.order`."""
    max_retries: int = 1
    """How often an episode whose process was lost is played again before its sample has failed."""
    kinds: Mapping[str, KindConfig] = field(default_factory=dict)
    """Limits of environments by their prompts' `source`: how many samples may wait for an answer at
    a time, and the answer's deadline. A source that is not named has no limits."""
    work_by_turn: bool = field(default=True, metadata=absent(False))
    """Whether, of a sample's tokens from an earlier launch, at most as many as a mean response has
    count as its work, for the choice of engines. False: all of those tokens count."""
    leaves_pool: bool = field(default=True, metadata=absent(False))
    """Whether a job lends its shared rollout pool to others while all samples of its round wait for
    slow environments. False: it keeps the pool."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "max_retries")


@dataclass(slots=True)
class Retracing:
    """Compares a trajectory, generated again, with the tokens that an earlier launch (submission to
    an engine) of its prompt left: they are kept up to the first token that differs. A position is a
    number of tokens after the prompt; environments' tokens count in all calls or in none."""

    carried: int = 0
    """Tokens that an earlier launch (submission to an engine) left, up to the last sampled one."""
    kept: int | None = None
    """Number of `carried` tokens that were sampled again as they were. None: not compared yet."""
    goes_on: bool = field(init=False)
    """True if all tokens so far were sampled as before, and more are left to compare."""

    def __post_init__(self) -> None:
        self.goes_on = self.carried > 0

    def drawn(self, start: int, num_tokens: int, num_kept: int | None) -> None:
        """Records a finished message that began at position `start`. `num_kept`: how many of its
        tokens are the earlier launch's. None: not compared, since a token before was different."""
        if not self.goes_on:
            return
        self.kept = (self.kept or 0) if num_kept is None else start + num_kept
        self.goes_on = num_kept == num_tokens and self.kept < self.carried

    def stopped(self, start: int, num_tokens: int, num_kept: int | None) -> bool:
        """Records a message that was stopped, with the arguments of `drawn`. Returns True if the
        trajectory now ends here, and False if it is still all that the earlier launch left."""
        if num_kept is not None:
            self.drawn(start, num_tokens, num_kept)
        return num_tokens > 0 and not (self.goes_on and num_kept is None)


@dataclass(slots=True)
class Episode:
    """State of one sample's exchange with its environment, in the current round."""

    turns: int = 0
    """Number of messages that the model has written in this episode so far."""
    tokens: int = 0
    """Number of the trajectory's tokens up to the end of the model's last message. The
    environment's tokens before it are included, the prompt's are not."""
    given: int = 0
    """Number of tokens that the environment gave after the model's last message."""
    environment_s: float = 0.0
    acts: bool = False
    """True while the environment is to answer, rather than the model to write."""
    is_open: bool = False
    """True from the first `Act` command until the environment is told of the episode's end."""
    replaces: tuple[SampleId, ...] = ()
    """Failed sample that this one replaces, whose random numbers it uses. Empty: there is none."""
    retracing: Retracing = field(default_factory=Retracing)


class Acting(Schedule[Acted]):
    """Decides which samples' environments are asked for an answer, and when. An `Act` command asks;
    an `Acted` event is the answer."""

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
        """Episode of each sample of the current round."""
        self.kept = KeptRows()

    def begin_round(self) -> None:
        super().begin_round()
        self.episodes.clear()
        self.kept.begin_round()

    def _act(self, *, sample: SampleId, timeout_s: float | None, retry: int) -> Command:
        episode = self.episodes[sample]
        episode.is_open = True
        return Act(sample=sample, turn=episode.turns, timeout_s=timeout_s, retry=retry)
