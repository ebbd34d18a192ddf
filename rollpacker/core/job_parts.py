"""What a job consists of, and what others ask of it between two events."""

from __future__ import annotations

from collections import Counter

from rollpacker.core.acting import Acting
from rollpacker.core.dynamic_sampling import StepGroups
from rollpacker.core.fleet import Fleet
from rollpacker.core.job_config import JobConfig
from rollpacker.core.ledger import Ledger
from rollpacker.core.lengths.learned import Learned
from rollpacker.core.parallelism import ParallelismPlanner
from rollpacker.core.phases import WAITS_FOR, Phase
from rollpacker.core.progress import Progress
from rollpacker.core.queues import Queues
from rollpacker.core.reward_schedule import RewardSchedule
from rollpacker.core.rounds import Round
from rollpacker.core.stream_plan import StreamPlan
from rollpacker.core.trainer_losses import TrainerLosses


class JobParts:
    """See `core/job.py`, which lists them."""

    def __init__(self, config: JobConfig) -> None:
        self.config = config
        self.phase = Phase.NEW
        self.progress = Progress()
        self.ledger = Ledger()
        self.queues = Queues(config)
        self.lengths = Learned(config)
        self.rewards = RewardSchedule(config.rewards)
        self.acting = None if config.acting is None else Acting(config.acting)
        self.parallelism = ParallelismPlanner(config.parallelism)
        self.num_late = Counter[str]()  # by event name, and zombies
        layout, apart = config.layouts[0], config.trainer_apart
        self.fleet: Fleet | None = None
        if config.fleet is not None:
            by_turn = config.acting is not None and config.acting.work_by_turn
            self.fleet = Fleet(
                *(config.fleet, self.num_late, layout.train_group),
                trainer_apart=apart,
                by_turn=by_turn,
            )
        self.stream = StreamPlan(
            *(config.stream, layout),
            max_response_tokens=config.max_response_tokens,
            trainer_apart=apart,
            why_kept=str if self.fleet is None else self.fleet.why_kept,
        )
        self.trainer = TrainerLosses(config.max_trainer_losses)
        self._round: Round | None = None
        self._gathered: StepGroups | None = None
        """What the rounds of this step have brought; None between steps."""
        self._stop_reason: str | None = None

    @property
    def step(self) -> int:
        """Steps committed."""
        return self.progress.step

    @property
    def version(self) -> int:
        """Optimizer steps applied."""
        return self.progress.version

    @property
    def num_queued(self) -> int:
        """Deferred prompts, whatever they wait for."""
        return len(self.queues)

    def waiting_for(self) -> str:
        """In words, for the message of a deadline."""
        if self._round is not None:
            nobody = self.fleet is not None and self._round.num_under_way and self.fleet.nobody()
            return nobody or self._round.waiting_for()
        what = WAITS_FOR.get(self.phase, "nothing")
        return what.format(step=self.step, next_step=self.step + 1, version=self.version)

    @property
    def waits_for_rewards(self) -> bool:
        """The engine is done; only verdicts are missing."""
        return self._round is not None and not self._round.num_under_way

    @property
    def evaluation_is_due(self) -> bool:
        """Before the run goes on: it is about to begin, or its step is committed. A driver that
        starts or resumes a run asks; later `Commit` says it."""
        return self.progress.evaluation_is_due(self.config.cadence, last=self.nothing_left())

    def nothing_left(self) -> bool:
        """Whether a run that stands here is over: no step is to come, and nobody waits."""
        ends = self.progress.data_ended or self.progress.out_of_steps(self.config.max_steps)
        return ends and not self.num_queued
