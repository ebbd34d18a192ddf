"""The port of device pools (groups of devices) that other jobs may use in between: carries out
`Enter`, `Leave` and `Remind`, and answers with `Entered` and `Reminded`.

    Leave(rollout)    engines release their devices       |
    Leave(train)      the trainer releases its devices    | -> the scheduler may give them away
    Enter(pool)       waits for the scheduler; engines or trainer take their devices, and engines
                      load the weights that were published meanwhile -> Entered
    Remind(after_s)   waits for so many seconds -> Reminded

Enter and Leave run in tasks of their own, one after the other, since the main task itself may wait
for a pool (`borrowed`). Before the main task needs engines or trainer in a pool that was left, as
for a checkpoint, it waits until they have released their devices (`parked`).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

from rollpacker.bus import Bus, OwnPools, Routes
from rollpacker.cluster.seats.seat import Seat
from rollpacker.core.commands import Enter, Leave, Remind
from rollpacker.core.events import Entered, PoolNeeded, PoolUnneeded, Reminded
from rollpacker.core.ids import PoolName
from rollpacker.core.job.phases import Phase
from rollpacker.core.job.pooled_job import waits_for_pool
from rollpacker.core.records import POOL_SWITCH
from rollpacker.run.errors import EnginesLost, reaching_the_cluster
from rollpacker.run.ports.engines import Engines, Weights
from rollpacker.run.ports.hand_over import Publish, bring_up_to_date
from rollpacker.run.ports.held import Handle
from rollpacker.run.ports.main_task import MainTask
from rollpacker.run.ports.shared_devices import SharedDevices, on_engines
from rollpacker.run.ports.waiting import failures, in_daemon_thread
from rollpacker.run.ports.watch import Watch
from rollpacker.trainer.trainer import RanksLost


class Pools:
    """The device pools (groups of devices) of a run that has all its devices for itself: every wait
    for a pool ends at once."""

    publish: Publish | None = None
    """Copies weights to the engines' hosts while other jobs have the engines' devices. None if no
    other job uses the devices: engines then load weights at once."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus

    def routes(self) -> Routes:
        return OwnPools(self.bus.take).routes()

    @property
    def waited_s(self) -> float:
        """Seconds that the run has waited for devices which it shares with other jobs."""
        return 0.0

    def has(self, pool: PoolName) -> bool:
        """Whether the run has the devices of this pool now."""
        return True

    @contextlib.asynccontextmanager
    async def borrowed(self, pool: PoolName, purpose: str) -> AsyncIterator[None]:
        """A context in which the run has the pool, for work that the core has not commanded, such
        as an evaluation. `purpose`: the work, in a word. Used on the main task."""
        yield

    async def parked(self) -> None:
        """Wait until engines or trainer have released the devices of a pool that the run has
        left."""

    def close(self) -> None:
        """Stop waiting for device pools. Used on the event loop. Further calls do nothing."""


class _Wait:
    def __init__(self, command: Enter) -> None:
        self.pool, self.purpose = command.pool, command.purpose
        self.given_up = threading.Event()


class SharedPools(Pools):
    """The device pools (groups of devices) of a run that shares them with other jobs, for which it
    waits."""

    def __init__(
        self,
        bus: Bus,
        main: MainTask,
        watch: Watch,
        *,
        devices: SharedDevices,
        engines: Engines,
        seat: Seat,
        publish: Publish,
        tell: Callable[[], None],
    ) -> None:
        """`tell`: shows observers new log entries. One observer reports to the scheduler, which
        must hear of a finished step before devices are asked for."""
        super().__init__(bus)
        self.publish, self._tell = publish, tell
        self._main, self._watch, self._seat = main, watch, seat
        self._devices, self._engines = devices, engines
        self._wait: _Wait | None = None
        """The wait for the pool that the core has asked for. None if no pool is awaited. Used under
        the bus's lock."""
        self._reminder: asyncio.TimerHandle | None = None
        self._last: asyncio.Task[None] | None = None
        self._error: BaseException | None = None
        self._arrived: asyncio.Future[None] | None = None
        """Future that ends when the run gets the pool that `borrowed` waits for, as for an
        evaluation. None if `borrowed` waits for none."""

    def routes(self) -> Routes:
        return {
            Enter: self._on_enter,
            Leave: self._on_leave,
            Remind: lambda command: self._main.post(self._remind, command.after_s),
        }

    @property
    def waited_s(self) -> float:
        """Seconds that the run has waited for devices which it shares with other jobs. The core
        counts them."""
        return getattr(self.bus.job, "waited_s", 0.0)

    def has(self, pool: PoolName) -> bool:
        """Whether the run has the devices of this pool now, as the core knows it."""
        return getattr(self.bus.job, "pool", None) == pool

    @contextlib.asynccontextmanager
    async def borrowed(self, pool: PoolName, purpose: str) -> AsyncIterator[None]:
        """A context that waits for the pool and has it, as for an evaluation. Raises the error that
        ended the wait or the reloading, and `EnginesLost` if the run ends meanwhile."""
        if self.has(pool):
            yield
            return
        arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._arrived = self._main.awaited = arrived
        try:
            self.bus.take(PoolNeeded(time_s=0.0, pool=pool, purpose=purpose))
            if not (self.has(pool) or waits_for_pool(self.bus.job)):
                self._tell_that_none_comes()  # it has ended before it was asked
            await arrived
        finally:
            self._arrived = self._main.awaited = None
        yield
        self.bus.take(PoolUnneeded(time_s=0.0))

    async def parked(self) -> None:
        """Wait until the devices of the pool that the run has left are released. Raises the error
        of the release."""
        await asyncio.sleep(0)  # what was just said is begun
        if self._last is not None:
            await asyncio.wait({self._last})
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Give up waiting for a device pool, and cancel the task that takes or releases devices.
        Further calls do nothing."""
        with self.bus.lock:
            if self._wait is not None:
                self._wait.given_up.set()
                self._wait = None
        if self._last is not None:
            self._last.cancel()
        if self._reminder is not None:
            self._reminder.cancel()

    def _remind(self, after_s: float) -> None:
        event = Reminded(time_s=0.0)
        loop = asyncio.get_running_loop()
        if self._reminder is not None:
            self._reminder.cancel()
        self._reminder = loop.call_later(after_s, self.bus.take, event)

    def _on_enter(self, command: Enter) -> None:
        assert self._wait is None, f"{command} while another pool is awaited"
        self._wait = _Wait(command)
        self._main.post(self._begin, partial(self._enter, self._wait))

    def _on_leave(self, command: Leave) -> None:
        if self._wait is not None:
            self._wait.given_up.set()
            self._wait = None
            self._main.post(self._tell_that_none_comes)
        elif self.bus.job.phase is not Phase.DONE:  # else all ends, and the seat is given up last
            self._main.post(self._begin, partial(self._park, command.pool))

    def _tell_that_none_comes(self) -> None:
        """End the wait in `borrowed` (as of an evaluation) with `EnginesLost`, since the core has
        ended the run and the pool will not come."""
        if self._arrived is not None and not self._arrived.done():
            fleet = self.bus.job.fleet
            why = None if fleet is None else fleet.given_up
            self._arrived.set_exception(EnginesLost(why or "the run ended"))

    def _begin(self, what: Callable[[], Awaitable[None]]) -> None:
        """Take or release devices (`what`) in a task, after earlier ones. Its error ends the
        run."""
        before = self._last

        async def work() -> None:
            if before is not None:
                await asyncio.wait({before})
            if self._error is not None:  # who did not let go has it still
                return
            try:
                await what()
            except Exception as error:
                self._error = error
                self._main.fail(error)

        self._last = asyncio.get_running_loop().create_task(work())

    async def _enter(self, wait: _Wait) -> None:
        # The cluster hears of a commit before it is asked for more: it moves no job that holds
        # devices already.
        with self.bus.lock:  # what led here is logged
            pass
        self._tell()
        if not await self._granted(wait):
            return
        began = self.bus.clock.now()
        await (self._wake_trainer() if wait.pool == "train" else self._wake_engines())
        with self.bus.lock:
            is_wanted = self._wait is wait
            if is_wanted:
                self._wait = None
                switch_s = self.bus.clock.now() - began
                self.bus.take(Entered(time_s=0.0, pool=wait.pool, switch_s=switch_s))
        if not is_wanted:
            await self._park(wait.pool)
        elif self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    async def _granted(self, wait: _Wait) -> bool:
        """Wait until other jobs leave the pool, without a deadline. Returns False if the wait was
        given up."""

        def enter() -> bool:
            return self._seat.enter(wait.pool, wait.purpose, given_up=wait.given_up)

        with reaching_the_cluster():
            return await in_daemon_thread(enter)

    async def _park(self, pool: PoolName) -> None:
        began = self.bus.clock.now()
        await (self._park_trainer() if pool == "train" else self._park_engines())
        self.bus.note(POOL_SWITCH, self.bus.clock.now() - began, self.bus.job.step, {})
        with reaching_the_cluster():
            await in_daemon_thread(self._seat.leave, pool)

    # -- those that park and wake up ---------------------------------------------------------------

    async def _park_trainer(self) -> None:
        with contextlib.suppress(RanksLost):  # nothing of it is there; it is missed when needed
            letting_go = self._devices.trainer.offload()
            await self._watch.by("sync_s", letting_go, "the trainer to let go of its devices")

    async def _wake_trainer(self) -> None:
        with contextlib.suppress(RanksLost):  # whoever asks for something next brings it back
            reload = self._devices.trainer.reload()
            await self._watch.by("sync_s", reload, "the trainer to take its devices")

    async def _park_engines(self) -> None:
        lending = self._devices.lend_all()
        leaving = await self._watch.by("generation_s", lending, "engines to end what they have")
        offloading = on_engines(leaving, lambda engine: engine.offload(), self._within_s)
        failed = await self._watch.by("sync_s", offloading, "engines to let go of their devices")
        self._lose(failed)
        await asyncio.gather(*(handle.engine.close() for handle in failed))

    async def _wake_engines(self) -> None:
        with self.bus.lock:
            weights = self._engines.weights
            away = [handle for handle in self._engines.living if handle.is_away]
        arguments = {handle: (handle, weights) for handle in away}
        waking = failures(_wake_up, arguments, "wake up", self._within_s)
        failed = await self._watch.by("sync_s", waking, "engines to wake up with the new weights")
        self._lose(failed)
        await asyncio.gather(*(handle.engine.close() for handle in failed))
        self._devices.take_back()

    @property
    def _within_s(self) -> float | None:
        """Seconds that an engine may take to release or take its device. None (no limit) if engines
        cannot be replaced."""
        return None if self._engines.make is None else self._watch.deadlines.sync_s / 2

    def _lose(self, failed: dict[Handle, BaseException]) -> None:
        """Mark the engines that failed as lost; raise the error if engines cannot be replaced."""
        for handle, error in failed.items():
            if self._engines.make is None:
                raise error
            with self.bus.lock:
                self._engines.lose(handle, str(error))


def open_pools(
    seat: Seat | None,
    publish: Publish,
    tell: Callable[[], None],
    bus: Bus,
    main: MainTask,
    watch: Watch,
    *,
    devices: SharedDevices,
    engines: Engines,
) -> Pools:
    """Returns the device pools that the run shares through this seat (its connection to the
    scheduler); for `seat` None, pools that the run has for itself."""
    if seat is None:
        return Pools(bus)
    return SharedPools(
        bus,
        main,
        watch,
        devices=devices,
        engines=engines,
        seat=seat,
        publish=publish,
        tell=tell,
    )


def _wake_up(handle: Handle, weights: Weights) -> None:
    """Give an engine its device back and load the current weights, if it has older ones. Used in a
    thread of its own."""
    asyncio.run(handle.engine.reload())
    if handle.version != weights.version:
        bring_up_to_date(handle.engine, weights)
        handle.version = weights.version
