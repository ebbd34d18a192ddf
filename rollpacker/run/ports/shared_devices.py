"""Lends devices to engines or to the trainer's replicas, which take turns (`train.colocate`).

    StartGradients, TrainOn, a checkpoint    engines offload, then the replicas reload
    SyncWeights, Launch, an evaluation       the replicas offload, then engines reload
    Replace                                  a new engine loads on a device that engines have
    devices shared with other jobs           all engines release all devices, and take them back

Nothing is decided here: `core/fleet/devices.py` reads from the commands who is to have a device.
Engine k has `degree` devices from number k * degree on, process k of the trainer has device k.
Calls to an engine that is off its device wait (`Handle.told`), and cause it to come back. On a CPU
there is nothing to move, and the same calls are made.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from typing import Any

from rollpacker.bus import Bus
from rollpacker.config.schema import RunConfig
from rollpacker.engines.engine import Engine, EngineError
from rollpacker.run.ports.engines import Engines
from rollpacker.run.ports.held import Handle
from rollpacker.run.ports.waiting import failures
from rollpacker.run.ports.watch import Watch
from rollpacker.trainer.trainer import Trainer

LOOK_S = 0.005
"""Seconds between two looks whether an engine is empty, or a device is free."""


MemoryMove = Callable[[Engine], Coroutine[Any, Any, None]]
"""Function that makes an engine take, or release, its device's memory."""


class SharedDevices:
    """Moves engines and trainer replicas on and off the devices that they share. Calls of the
    `async` methods must not overlap; most come from the main task, which does slow work."""

    def __init__(
        self,
        bus: Bus,
        watch: Watch,
        shares_pools: bool = False,
        *,
        config: RunConfig,
        trainer: Trainer,
        engines: Engines,
    ) -> None:
        """`shares_pools`: whether the run shares the engines' devices with other jobs, which have
        them at first."""
        self._bus = bus
        self._watch = watch
        self.trainer = trainer
        self._engines = engines
        train = config.train
        of_engines = config.rollout.engines * config.parallelism_planner.initial
        self._is_colocated = train.colocate
        self._all = range(of_engines if shares_pools or train.colocate else 0)
        """Numbers of the devices that engines share with trainer or other jobs; empty: none."""
        self._group = (train.processes or 1) // train.replicas
        self._lent: set[int] = {*self._all} if shares_pools else set()
        """Numbers of devices that trainer replicas or other jobs have, or are about to get."""
        for handle in engines.living if shares_pools else ():
            handle.is_away = True
        self._loading: set[int] = set()
        """Numbers of the devices on which a new engine is loading."""
        self._seconds = {"to_trainer": 0.0, "to_engines": 0.0}

    def replicas_of(self, devices: Sequence[int]) -> list[int] | None:
        """Returns the numbers of trainer replicas on these devices; None (all) for no devices."""
        return sorted({device // self._group for device in devices}) or None

    @property
    def are_awaited(self) -> bool:
        """Whether calls to engines wait until these are back on their devices. The caller holds the
        lock under which events are handled."""
        return any(handle.told for handle in self._engines.living)

    def take_seconds(self) -> dict[str, float]:
        """Returns metrics with the seconds that moving devices took since the last call. Empty if
        trainer and engines share none."""
        found = {f"perf/devices/{name}_s": seconds for name, seconds in self._seconds.items()}
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        return found if self._is_colocated else {}

    async def to_replicas(self, devices: Sequence[int] = ()) -> None:
        """Give these devices (empty: all) to the trainer's replicas, once the engines there have
        finished their samples. An engine that does not release its memory is lost."""
        if not self._is_colocated:
            return
        wanted = {d for d in self._all if not devices or d // self._group in self._groups(devices)}
        named = f"devices {sorted(wanted)} to be free"
        leaving = await self._watch.by("generation_s", self._claim(wanted), named)
        if leaving is None:
            return
        with self._timing("to_trainer"):
            failed = await self._each(leaving, lambda engine: engine.offload())
            await asyncio.gather(*(handle.engine.close() for handle in failed))
            reload = self.trainer.reload(self.replicas_of(devices))
            await self._watch.by("train_s", reload, "the trainer to take its devices")

    async def to_engines(self) -> None:
        """Give all devices back to the engines, which keep the weights that they had. An engine
        that cannot take its device is lost."""
        if not self._lent or not self._is_colocated:
            return
        with self._timing("to_engines"):
            letting_go = self.trainer.offload()
            await self._watch.by("sync_s", letting_go, "the trainer to let go of its devices")
            with self._bus.lock:
                away = [handle for handle in self._engines.living if handle.is_away]
            failed = await self._each(away, lambda engine: engine.reload())
            await asyncio.gather(*(handle.engine.close() for handle in failed))
        self.take_back()

    async def lend_all(self) -> list[Handle]:
        """Lend all devices to other jobs, once no engine works, loads or closes on them. Returns
        the engines that must release their devices now and get no more calls."""
        leaving = await self._claim({*self._all})
        while not self._engines.ending.is_over:
            await asyncio.sleep(LOOK_S)
        return leaving or []

    def take_back(self) -> None:
        """Note that the engines have all their devices again, and make the calls of engines (such
        as new requests) that waited for that."""
        with self._bus.lock:
            self._lent.clear()
            for handle in [one for one in self._engines.living if one.is_away]:
                try:
                    handle.come_back()
                except EngineError as error:
                    self._engines.lose(handle, str(error))

    @contextlib.contextmanager
    def loading(self, number: int) -> Iterator[None]:
        """A context in which new engine `number` may load: waits until its devices are not lent,
        and keeps them so. Used in a thread of its own. Raises `EngineError` once the run is
        over."""
        size = self._engines.layout.tensor_parallel
        devices = {*range(number * size, (number + 1) * size)} & {*self._all}
        while not self._keep(devices):
            time.sleep(LOOK_S)
        try:
            yield
        finally:
            with self._bus.lock:
                self._loading -= devices

    def _keep(self, devices: set[int]) -> bool:
        with self._bus.lock:
            if self._engines.is_closed:
                raise EngineError("the run is over")
            if devices & self._lent:
                return False
            self._loading |= devices
            return True

    def _groups(self, devices: Collection[int]) -> set[int]:
        return {device // self._group for device in devices}

    async def _claim(self, wanted: set[int]) -> list[Handle] | None:
        """Wait until no engine works or loads on these devices, and mark them as lent. Returns the
        engines that must release them; None if all were lent before."""
        while True:
            with self._bus.lock:
                numbers = {device // self._engines.layout.tensor_parallel for device in wanted}
                if not (self._engines.num_at(numbers) or self._loading & wanted):
                    are_there = wanted <= self._lent
                    self._lent |= wanted
                    leaving = [h for h in self._engines.living if h.number in numbers]
                    leaving = [handle for handle in leaving if not handle.is_away]
                    for handle in leaving:
                        handle.is_away = True
                    return None if are_there else leaving
                awaited = self.are_awaited
            if awaited:
                await self.to_engines()
            await asyncio.sleep(LOOK_S)

    async def _each(self, handles: Sequence[Handle], do: MemoryMove) -> list[Handle]:
        """Await `do(engine)` for all these engines at once. Returns the engines that failed, now
        lost."""
        within_s = self._watch.deadlines.sync_s / 2
        failed = await on_engines(handles, do, within_s)
        with self._bus.lock:
            for handle, error in failed.items():
                self._engines.lose(handle, str(error))
        return [*failed]

    @contextlib.contextmanager
    def _timing(self, name: str) -> Iterator[None]:
        began = self._bus.clock.now()
        yield
        self._seconds[name] += self._bus.clock.now() - began


async def on_engines(
    handles: Sequence[Handle], do: MemoryMove, within_s: float | None = None
) -> dict[Handle, BaseException]:
    """Await `do(engine)` for all these engines at once. Returns the errors of engines that failed,
    or took more than `within_s` seconds (None: no limit)."""
    arguments = {handle: (do, handle.engine) for handle in handles}
    return await failures(_hand_over, arguments, "hand its device over", within_s)


def _hand_over(do: MemoryMove, engine: Engine) -> None:
    asyncio.run(do(engine))


async def let_go_of_all(engines: Engines) -> None:
    """Have all engines release their devices before a run begins, so that the trainer can load
    there. Raises an engine's error."""
    for handle in engines.living:
        handle.is_away = True
    for error in (await on_engines(engines.living, lambda engine: engine.offload())).values():
        raise error


async def take_all_back(trainer: Trainer, engines: Engines) -> None:
    """Reverse `let_go_of_all`: the trainer releases the devices, and the engines take them back.
    Raises an engine's error."""
    away = [handle for handle in engines.living if handle.is_away]
    if away:
        await trainer.offload()
    for error in (await on_engines(away, lambda engine: engine.reload())).values():
        raise error
    for handle in away:
        handle.come_back()
