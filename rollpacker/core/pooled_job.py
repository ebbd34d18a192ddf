"""A job whose devices are not always its own: it generates on one pool, trains on another, and
takes turns with other jobs on both (`coexecution/`).

    RunStarted, Committed    Enter(rollout)  -> Entered -> the round begins
    a refill's Launch        the same
    all samples have ended   Leave(rollout), and verdicts are awaited without a pool
    TrainOn                  Enter(train)    -> Entered -> StartGradients, TrainOn
    WeightsSynced            Leave(train), then Commit
    PoolNeeded               Enter           -> Entered: an evaluation, a trainer that is restored
    PoolUnneeded             Leave

It is the job that it would be alone, but for these: what needs a pool is held back until the pool
is there, and nothing else changes. So it computes the same. It holds one pool at most, and waits
for nobody while it holds training. The time that it waits is no part of its clock, which stands
still meanwhile: whoever learns from seconds learns from its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rollpacker.core.commands import (
    Command,
    Enter,
    Launch,
    Leave,
    Move,
    Place,
    Replace,
    Resize,
    StartGradients,
    SyncWeights,
    TrainOn,
)
from rollpacker.core.events import (
    Committed,
    Entered,
    Event,
    PoolNeeded,
    PoolUnneeded,
    RunStarted,
)
from rollpacker.core.ids import PoolName
from rollpacker.core.job import Job
from rollpacker.core.job_config import JobConfig
from rollpacker.core.phases import Phase

NEEDS: Mapping[type[Command], PoolName] = {
    **dict.fromkeys((Launch, Place, Move, Replace, Resize), "rollout"),
    **dict.fromkeys((StartGradients, TrainOn, SyncWeights), "train"),
}
"""Commands that are held back until the pool is the job's."""
CALLS: Mapping[type[Command], str] = {Launch: "round", TrainOn: "step"}
"""Those for which it is entered, and what for. The others come along."""


class PooledJob(Job):
    """See `Job`, whose events and commands it has, and four more."""

    def __init__(self, config: JobConfig) -> None:
        super().__init__(config)
        self.pool: PoolName | None = None
        """That is the job's now."""
        self.entering: PoolName | None = None
        """That was asked for."""
        self.waited_s = 0.0
        """For pools, and until parked processes had woken up."""
        self._asked_s = 0.0
        self._held: list[Command] = []
        self._begin: RunStarted | Committed | None = None
        """What the next round begins with, once the rollout pool is there."""
        self._needed: PoolNeeded | None = None
        """By the driver itself."""

    def handle(self, event: Event) -> list[Command]:
        """See `Job.handle`."""
        now_s = event.time_s
        match event:
            case Entered():
                commands = self._on_entered(event)
            case PoolNeeded():
                assert self._needed is None, f"{event} while {self._needed} goes on"
                self._needed, commands = event, []
            case PoolUnneeded():
                assert self._needed is not None, f"{event}, which nobody needed"
                self._needed, commands = None, []
            case RunStarted() | Committed() if not self._ends_here():
                self._begin, commands = event, []
            case _:
                commands = self._inner(event)
        if self._begin is not None and self._ends_here():
            # A wish to stop that comes while the round waits for its pool ends the run without it.
            begin, self._begin = self._begin, None
            commands += self._inner(replace(begin, time_s=now_s))
        return self._turn(commands, now_s)

    def state(self) -> dict[str, Any]:
        """See `Job.state`."""
        return {**super().state(), "waited_s": self.waited_s}

    @classmethod
    def restore(
        cls, config: JobConfig, state: Mapping[str, Any], *, data_ended: bool | None = None
    ) -> PooledJob:
        """See `Job.restore`. Whether it shared pools before does not matter."""
        job = super().restore(config, state, data_ended=data_ended)
        assert isinstance(job, cls)
        job.waited_s = state.get("waited_s", 0.0)
        return job

    def _inner(self, event: Event) -> list[Command]:
        """The job's answer, by its own clock, which stands while it waits."""
        waits_s = 0.0 if self.entering is None else event.time_s - self._asked_s
        return super().handle(replace(event, time_s=event.time_s - self.waited_s - waits_s))

    def _ends_here(self) -> bool:
        """No round follows the commit at hand, as far as is known without asking the cursor."""
        return self.nothing_left() or self._stop_reason is not None

    def _on_entered(self, event: Entered) -> list[Command]:
        if event.pool != self.entering:
            raise AssertionError(f"{event} while the job waits for {self.entering}")
        self.pool, self.entering = event.pool, None
        self.waited_s += event.time_s - self._asked_s
        commands = [one for one in self._held if NEEDS[type(one)] == self.pool]
        self._held = [one for one in self._held if NEEDS[type(one)] != self.pool]
        if self.pool == "rollout" and self._begin is not None:
            begin, self._begin = self._begin, None
            commands += self._inner(replace(begin, time_s=event.time_s))
        return commands

    def _turn(self, commands: list[Command], now_s: float) -> list[Command]:
        """Hold back what needs another pool, leave the one that is not needed any more, and ask for
        the next."""
        said: list[Command] = []
        if self.pool is not None and not self._still_needs(self.pool):
            said.append(Leave(pool=self.pool))
            self.pool = None
        for command in commands:
            if NEEDS.get(type(command), self.pool) == self.pool:
                said.append(command)
            else:
                self._held.append(command)
        wanted = self._wanted()
        if self.entering is not None and wanted is None:
            said.insert(0, Leave(pool=self.entering))
            self.waited_s += now_s - self._asked_s
            self.entering = None
        if self.pool is None and self.entering is None and wanted is not None:
            self.entering, purpose = wanted
            self._asked_s = now_s
            said.append(Enter(pool=self.entering, purpose=purpose))
        return said

    def _still_needs(self, pool: PoolName) -> bool:
        if self.phase is Phase.DONE:
            return False
        if self._needed is not None and self._needed.pool == pool:
            return True
        if pool == "train":
            return self.phase in (Phase.TRAINING, Phase.SYNCING)
        # While prompts are fetched the round has begun already.
        return self.phase is Phase.FETCHING or (
            self.phase is Phase.ROLLING and not self.waits_for_rewards
        )

    def _wanted(self) -> tuple[PoolName, str] | None:
        """The pool without which nothing goes on, and what for."""
        if self.phase is Phase.DONE:
            return None
        if self._needed is not None:
            return self._needed.pool, self._needed.purpose
        for command in self._held:
            if type(command) in CALLS:
                return NEEDS[type(command)], CALLS[type(command)]
        return None if self._begin is None else ("rollout", "round")


def waits_for_pool(job: Job) -> bool:
    """Nothing goes on before devices are there that other jobs have."""
    return isinstance(job, PooledJob) and job.entering is not None


def make_job(config: JobConfig) -> Job:
    """The job of a new run."""
    return PooledJob(config) if config.shares_pools else Job(config)


def restore_job(
    config: JobConfig, state: Mapping[str, Any], *, data_ended: bool | None = None
) -> Job:
    """See `Job.restore`."""
    kind = PooledJob if config.shares_pools else Job
    return kind.restore(config, state, data_ended=data_ended)
