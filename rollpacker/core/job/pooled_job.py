"""A job that shares its devices with other jobs: it generates on one pool of devices, trains on
another, and takes turns with the other jobs on both (`coexecution/`). What it answers:

    RunStarted, Committed:    Enter(rollout), and after Entered the round begins;
    a refill is due:          the same;
    all samples have ended:   Leave(rollout), and verdicts are awaited without a pool;
    TrainOn is due:           Enter(train), and after Entered StartGradients, TrainOn;
    WeightsSynced:            Leave(train), then Commit;
    all act for long:         Leave(rollout) (`stay.py`);
    Acted after that:         Enter(rollout), and after Entered Continue, Launch;
    PoolNeeded:               Enter, and after Entered an evaluation, or a trainer is restored;
    PoolUnneeded:             Leave.

A refill is a further round for a step that lacks groups; samples act while environments answer.
Commands that need a pool are held back until the job has it; otherwise the job is what it would be
alone, so it computes the same. It holds one pool at most, and waits for no other job while it has
the training pool. Its clock stands still while it waits for a pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from msgspec.structs import replace

from rollpacker.core.commands import (
    Abort,
    Command,
    Continue,
    Enter,
    Launch,
    Leave,
    Move,
    Place,
    Remind,
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
    Reminded,
    SampleAborted,
    StopRequested,
    WeightsSynced,
)
from rollpacker.core.ids import PoolName
from rollpacker.core.job.config import JobConfig
from rollpacker.core.job.job import Job
from rollpacker.core.job.phases import Phase
from rollpacker.core.job.progress import MAX_EMPTY_STEPS
from rollpacker.core.job.stay import Stay
from rollpacker.core.rounds.queues import NextRound
from rollpacker.core.rounds.round import Round
from rollpacker.core.rounds.turn_round import TurnRound

NEEDS: Mapping[type[Command], PoolName] = {
    **dict.fromkeys((Launch, Continue, Place, Move, Replace, Resize), "rollout"),
    **dict.fromkeys((StartGradients, TrainOn, SyncWeights), "train"),
}
"""The pool that each of these kinds of command needs; such a command is given out only while the
job has that pool. Other kinds need no pool."""


class PooledJob(Job):
    """A `Job` that shares its pools of devices with other jobs: it holds each command back until it
    has the pool that the command needs. To ask for pools it gives `Enter`, `Leave` and `Remind`."""

    HANDLERS: ClassVar[dict[type, str]] = {
        **Job.HANDLERS,
        Entered: "_on_entered",
        PoolNeeded: "_on_needed",
        PoolUnneeded: "_on_unneeded",
        Reminded: "_on_reminded",
    }

    def __init__(self, config: JobConfig) -> None:
        super().__init__(config)
        self.pool: PoolName | None = None
        """Pool of devices that the job has now. None: it has none."""
        self.entering: PoolName | None = None
        """Pool that the job has asked for and waits for. None: it waits for none."""
        self.waited_s = 0.0
        """Seconds that the job has waited for pools, and for its engines and trainer to wake up
        then, since it began or was restored."""
        self._asked_s = 0.0
        self._held: list[Command] = []
        """Commands held back until the job has their pool (`NEEDS`), such as `TrainOn`."""
        self._begins = False
        """True if a step begins as soon as the job has the rollout pool."""
        self._refill: NextRound | None = None
        """Round for groups that a step lacks, held back until the rollout pool is there; else
        None."""
        self._answered: list[Launch | Continue] = []
        """`Launch` and `Continue` commands for samples whose environments answered after the job
        left the rollout pool. Their engines are named when the job has the pool again."""
        self._stay = Stay()
        self._may_leave = config.acting is not None and config.acting.leaves_pool
        """True if the job gives up the rollout pool while only environments work."""
        self._checkpointed = False
        """True if the last commit wrote a checkpoint."""
        self._needed: PoolNeeded | None = None
        """Pool that the program which carries out commands has asked for, to evaluate or to restore
        the trainer. None: it needs none."""

    def handle(self, event: Event) -> list[Command]:
        """Commands that answer the event, as in `Job.handle`: held back while they need a pool that
        the job does not have, and with the commands that enter and leave pools."""
        now_s = event.time_s
        waits_s = 0.0 if self.entering is None else now_s - self._asked_s
        own = replace(event, time_s=now_s - self.waited_s - waits_s)
        released: list[Command] = []
        if isinstance(event, Entered):
            released = self._enter(event)
        return self._turn([*released, *super().handle(own)], now_s)

    def waiting_for(self) -> str:
        """What the job waits for, in words: a pool, or else the same as in `Job.waiting_for`."""
        if self.entering is None:
            return super().waiting_for()
        return f"the {self.entering} pool, which other jobs use too"

    # -- what is held back -------------------------------------------------------------

    def _next_step(self) -> list[Command]:
        ends = self.nothing_left() or self.progress.num_empty_steps == MAX_EMPTY_STEPS
        if self.pool == "rollout" or ends:
            return super()._next_step()
        self._begins = True
        return []

    def _start(self, next_round: NextRound) -> list[Command]:
        if self.pool == "rollout":
            return super()._start(next_round)
        self._refill, self.phase = next_round, Phase.ROLLING
        return []

    def _after(self, round_: Round, commands: list[Command]) -> list[Command]:
        if self.pool != "rollout":
            commands = self._without_pool(round_, commands)
        return super()._after(round_, commands)

    def _without_pool(self, round_: Round, commands: list[Command]) -> list[Command]:
        """Those of the round's `commands` that can be given without the rollout pool. `Launch` and
        `Continue` go to `_answered`; a sample aborted before its own is given counts as stopped."""
        said: list[Command] = []
        for command in commands:
            if isinstance(command, Launch | Continue):
                self._answered.append(command)
            elif isinstance(command, Abort):
                for sample in command.samples:
                    self._answered = [one for one in self._answered if one.samples != (sample,)]
                    event = SampleAborted(time_s=0.0, sample=sample, num_tokens=0)
                    said += self._without_pool(round_, round_.on_aborted(event))
            else:
                said.append(command)
        return said

    def _enter(self, event: Entered) -> list[Command]:
        """Notes that the job has the pool. Returns the commands held back for this pool."""
        if event.pool != self.entering:
            raise AssertionError(f"{event} while the job waits for {self.entering}")
        self.pool, self.entering = event.pool, None
        self.waited_s += event.time_s - self._asked_s
        released = [self._renewed(one) for one in self._held if NEEDS[type(one)] == self.pool]
        self._held = [one for one in self._held if NEEDS[type(one)] != self.pool]
        return released

    def _renewed(self, command: Command) -> Command:
        """The held-back command as it is given now: a `Replace` asks for the newest weights."""
        return replace(command, version=self.version) if type(command) is Replace else command

    def _on_entered(self, event: Entered) -> list[Command]:
        if event.pool == "train":
            self._stay.trains(event.time_s)
            return []
        self._stay.woke(event.switch_s)
        answered, self._answered = self._answered, []
        if answered:
            return [*answered]
        refill, self._refill = self._refill, None
        if refill is not None:
            return self._start(refill)
        begins, self._begins = self._begins, False
        return self._next_step() if begins else []

    def _on_needed(self, event: PoolNeeded) -> list[Command]:
        assert self._needed is None, f"{event} while {self._needed} goes on"
        self._needed = event
        return []

    def _on_unneeded(self, event: PoolUnneeded) -> list[Command]:
        assert self._needed is not None, f"{event}, which nobody needed"
        self._needed = None
        return []

    def _on_reminded(self, event: Reminded) -> list[Command]:
        self._stay.reminded()
        return []

    def _on_synced(self, event: WeightsSynced) -> list[Command]:
        self._stay.trained(event.time_s)
        return super()._on_synced(event)

    def _on_committed(self, event: Committed) -> list[Command]:
        self._checkpointed = event.checkpointed
        return super()._on_committed(event)

    def _on_stop(self, event: StopRequested) -> list[Command]:
        """Ends the run at once if the job waits for the rollout pool to begin a step; otherwise the
        run ends after the current step."""
        commands = super()._on_stop(event)
        if not self._begins:
            return commands
        assert self._stop_reason is not None
        self._begins = False
        if self.phase is Phase.COMMITTING and not self._checkpointed:
            return self._commit(num_steps=0)
        return self._finish(self._stop_reason)

    # -- which pool --------------------------------------------------------------------

    def _turn(self, commands: list[Command], now_s: float) -> list[Command]:
        """Returns those of `commands` that need no pool or the pool that the job has, and holds
        back the others. Adds those that leave a pool no longer used and ask for the next one."""
        said: list[Command] = []
        after_s = self._stay.look(now_s, rests=self.pool == "rollout" and self._only_acts())
        if after_s is not None:
            said.append(Remind(after_s=after_s))
        if self.pool is not None and not self._still_needs(self.pool):
            said.append(Leave(pool=self.pool))
            if self.acting is not None and self._may_leave and self.pool == "rollout":
                self.acting.kept.begin_round()  # engines that park keep nothing
            self.pool = None
        for command in commands:
            needs = NEEDS.get(type(command))
            (said if needs is None or needs == self.pool else self._held).append(command)
        wanted = self._wanted()
        if self.entering is not None and self.entering not in dict(wanted):
            said.insert(0, Leave(pool=self.entering))
            self.waited_s += now_s - self._asked_s
            self.entering = None
        if self.pool is None and self.entering is None and wanted:
            self.entering, purpose = wanted[0]
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
            self.phase is Phase.ROLLING and not (self.waits_for_rewards or self._stay.is_over)
        )

    def _only_acts(self) -> bool:
        """Whether all unfinished samples wait for their environments' answers, so that engines are
        idle and the job may leave the rollout pool."""
        round_ = self._round
        if not (self._may_leave and isinstance(round_, TurnRound)):
            return False
        return 0 < round_.num_acting == round_.num_under_way

    def _wanted(self) -> list[tuple[PoolName, str]]:
        """Pools that the job needs now, with purposes (`Enter.purpose`), in order of asking."""
        wanted: list[tuple[PoolName, str]] = []
        if self.phase is Phase.DONE:
            return wanted
        if self._needed is not None:
            wanted.append((self._needed.pool, self._needed.purpose))
        if any(type(command) is TrainOn for command in self._held):
            wanted.append(("train", "step"))
        if self._begins or self._refill is not None:
            wanted.append(("rollout", "round"))
        if self._answered:
            wanted.append(("rollout", "turns"))
        return wanted


def waits_for_pool(job: Job) -> bool:
    """Whether the job can do nothing before it is given a shared pool that it has asked for."""
    return isinstance(job, PooledJob) and job.entering is not None


def make_job(config: JobConfig) -> Job:
    """The job of a new run: a `PooledJob` if the configuration says that its pools are shared."""
    return PooledJob(config) if config.shares_pools else Job(config)


def restore_job(
    config: JobConfig, state: Mapping[str, Any], *, data_ended: bool | None = None
) -> Job:
    """The job that a checkpoint's `state` describes, under the present configuration. Whether its
    pools were shared when it was saved does not matter."""
    kind = PooledJob if config.shares_pools else Job
    return kind.restore(config, state, data_ended=data_ended)
