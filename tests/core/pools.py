"""The pools of the tests' worlds: how long one waits for them, and what a driver needs them for."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from rollpacker.bus import Routes
from rollpacker.core.commands import Commit, Enter, Finish, Leave, Remind
from rollpacker.core.events import Entered, Event, PoolNeeded, PoolUnneeded, Reminded
from rollpacker.core.ids import PoolName
from rollpacker.core.job.phases import Phase
from rollpacker.core.job.pooled_job import NEEDS, PooledJob
from rollpacker.core.records import Record

if TYPE_CHECKING:
    from tests.core.world import World

EVALUATION_S = 2.0


class Broker(Protocol):
    """Says when a pool is whose."""

    def ask(self, driver: Driver, pool: PoolName) -> None: ...

    def left(self, driver: Driver, pool: PoolName) -> None:
        """It was held, or awaited."""
        ...


class AtRandom:
    """Waits as a seed says: none in `none_share` of them, else up to `most_s` seconds."""

    def __init__(self, seed: int, *, most_s: float = 100.0, none_share: float = 0.3) -> None:
        self.rng = random.Random(f"pools {seed}")
        self.most_s, self.none_share = most_s, none_share

    def ask(self, driver: Driver, pool: PoolName) -> None:
        wait_s = 0.0
        if self.rng.random() >= self.none_share:
            wait_s = round(self.rng.random() * self.most_s, 3)
        driver.grant(driver.world.time_s + wait_s, switch_s=wait_s / 4)

    def left(self, driver: Driver, pool: PoolName) -> None:
        pass


class FirstCome:
    """Pools that several worlds share: one has it, others wait in the order of asking."""

    def __init__(self, switch_s: float = 0.5) -> None:
        self.switch_s = switch_s
        self.holder: dict[PoolName, Driver] = {}
        self.queue: dict[PoolName, deque[Driver]] = {"rollout": deque(), "train": deque()}

    def ask(self, driver: Driver, pool: PoolName) -> None:
        if pool in self.holder:
            self.queue[pool].append(driver)
        else:
            self._give(driver, pool, driver.world.time_s)

    def left(self, driver: Driver, pool: PoolName) -> None:
        if self.holder.get(pool) is not driver:
            self.queue[pool].remove(driver)
            return
        del self.holder[pool]
        if self.queue[pool]:
            self._give(self.queue[pool].popleft(), pool, driver.world.time_s)

    def _give(self, driver: Driver, pool: PoolName, now_s: float) -> None:
        self.holder[pool] = driver
        driver.grant(now_s + self.switch_s, switch_s=self.switch_s)


class Driver:
    """The port of a world's pools, and what a real driver asks them for itself."""

    def __init__(self, world: World, broker: Broker) -> None:
        self.world, self.broker = world, broker
        self.held: PoolName | None = None
        self.asked: PoolName | None = None
        self.due: Entered | None = None
        self.needed: tuple[PoolName, str, Callable[[], None]] | None = None
        self.begun = self.finishing = False
        """Of what it needs now."""
        self.needs: deque[tuple[PoolName, str, Callable[[], None]]] = deque()
        self.num_given_up = 0
        self.reminder: Reminded | None = None

    def routes(self) -> Routes:
        return {Enter: self.enter, Leave: self.leave, Remind: self.remind}

    def enter(self, command: Enter) -> None:
        assert self.held is None and self.asked is None, command
        self.asked = command.pool
        self.broker.ask(self, command.pool)

    def leave(self, command: Leave) -> None:
        if self.held == command.pool:
            self.held = None
        else:
            assert self.asked == command.pool, command
            self.asked = self.due = None
            self.num_given_up += 1
        self.broker.left(self, command.pool)

    def remind(self, command: Remind) -> None:
        self.reminder = Reminded(time_s=0.0)
        self.world.push(command.after_s, self.reminder)

    def grant(self, at_s: float, switch_s: float) -> None:
        assert self.asked is not None
        self.due = Entered(time_s=0.0, pool=self.asked, switch_s=switch_s)
        self.world.push(max(0.0, at_s - self.world.time_s), self.due)

    def meets(self, event: Event) -> bool:
        """Whether it still comes."""
        if isinstance(event, Entered):
            if event is not self.due:
                return False
            self.held, self.asked, self.due = self.asked, None, None
        return not isinstance(event, Reminded) or event is self.reminder

    # -- what the driver itself needs --------------------------------------------------

    def need(self, pool: PoolName, purpose: str, begin: Callable[[], None]) -> None:
        """`begin` is called when it is there; `done` says that it is not needed any more."""
        self.needs.append((pool, purpose, begin))
        self._next_need()

    def _next_need(self) -> None:
        if self.needed is None and self.needs:
            self.needed, self.begun, self.finishing = self.needs.popleft(), False, False
            pool, purpose, _ = self.needed
            self.world.push(0.0, PoolNeeded(time_s=0.0, pool=pool, purpose=purpose))

    def done(self, after_s: float = 0.0) -> None:
        self.finishing = True
        self.world.push(after_s, PoolUnneeded(time_s=0.0))

    def recovered(self) -> None:
        """The trainer is back."""
        is_for_it = self.needed is not None and self.needed[1] == "recovery"
        if is_for_it and self.begun and not self.finishing:
            self.done()

    def heard(self, event: Event) -> None:
        """The core has answered to it."""
        if isinstance(event, PoolUnneeded):
            needed, self.needed = self.needed, None
            if needed is not None and needed[1] == "evaluation":
                self.world.evaluated()
            self._next_need()
        if isinstance(event, Entered) and event.pool == "train":
            self.world.trainer.may_restore()
        if isinstance(event, Entered | PoolNeeded) and self.needed is not None:
            pool, _, begin = self.needed
            if self.held == pool and not self.begun:
                self.begun = True
                begin()


def check_now(job: PooledJob) -> None:
    """What holds after every event."""
    assert job.pool is None or job.entering is None, "it waits while it holds one"
    idle = job.phase in (Phase.NEW, Phase.COMMITTING) or job.waits_for_rewards
    needed = None if job._needed is None else job._needed.pool
    if idle:
        assert job.pool in (None, needed), f"{job.pool} is held in {job.phase}"
    if job.phase is Phase.DONE:
        assert job.pool is None and job.entering is None
    if job.phase in (Phase.TRAINING, Phase.SYNCING):
        # Whatever else may be waited for first, it is not held.
        assert job.pool == "train" or job.entering is not None


def check_log(records: list[Record]) -> None:
    """Pools are held one at a time, for what needs them, and in the end none."""
    pool: PoolName | None = None
    entering: PoolName | None = None
    needed: PoolName | None = None
    for record in records:
        match record.event:
            case Entered(pool=entered):
                assert entered == entering, "nobody waits for it"
                pool, entering = entering, None
            case PoolNeeded(pool=needed):
                pass
            case PoolUnneeded():
                needed = None
        for command in record.commands:
            match command:
                case Enter():
                    assert pool is None and entering is None, command
                    entering = command.pool
                case Leave():
                    assert command.pool in (pool, entering), command
                    pool = entering = None
                case Commit():  # a trainer that was lost may be on its way back
                    assert pool in (None, needed), f"{command} with {pool}"
                case Finish():
                    assert pool is None and entering is None, f"{command} with {pool} {entering}"
                case _:
                    assert NEEDS.get(type(command), pool) == pool, f"{command} on {pool}"
    assert pool is None and entering is None, "something is left"
