"""Brings new weights to the engines (`SyncWeights`, answered by `WeightsSynced`), and adds engines
that have the current weights (`Replace` or `Resize`, answered by `EngineReady`).

    SyncWeights -> the trainer writes weights -> each engine loads them, in a thread of its own; if
                   other jobs share the devices, when it has its device again (`pools.py`)
    Replace     -> an engine is made, in a thread of its own -> loads the current weights, and any
                   that came meanwhile -> joins the others
    Resize      -> all engines are closed -> the same for each of the new ones
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from rollpacker.bus import Bus, Routes
from rollpacker.core.commands import Replace, Resize, SyncWeights
from rollpacker.core.events import WeightsSynced
from rollpacker.engines.engine import Engine, EngineError
from rollpacker.run.ports.engines import Engines, Weights
from rollpacker.run.ports.held import EngineLayout, Handle
from rollpacker.run.ports.main_task import MainTask
from rollpacker.run.ports.shared_devices import SharedDevices, take_all_back
from rollpacker.run.ports.waiting import failures, in_daemon_thread
from rollpacker.run.ports.watch import Watch
from rollpacker.trainer.trainer import Trainer, TrainerError

if TYPE_CHECKING:
    from rollpacker.weights.buffer import WeightSource

logger = logging.getLogger(__name__)

Publish = Callable[["WeightSource"], Mapping[str, Exception]]
"""Function that copies weights to all hosts with engines. Returns an error for each host that was
not reached, by host name."""

WRITTEN_S = 0.02
"""Seconds between two looks of a new engine whether the trainer has written the weights."""


@dataclass(frozen=True, slots=True)
class HandingOver:
    """Brings the trainer's weights to all engines, on the main task (which does slow work); to
    engines that are added in between, in threads of their own."""

    bus: Bus
    main: MainTask
    watch: Watch
    trainer: Trainer
    engines: Engines
    devices: SharedDevices
    publish: Publish | None
    """Copies weights to the engines' hosts while other jobs have the engines' devices; engines load
    them when they are back. None: no other job uses the devices; engines load at once."""

    def routes(self) -> Routes:
        return {
            SyncWeights: lambda command: self.main.later(partial(self._sync, command)),
            Replace: self._replace,
            Resize: self._resize,
        }

    async def _sync(self, command: SyncWeights) -> None:
        await self.watch.by("sync_s", self._hand_over(command.version))
        self.bus.take(WeightsSynced(time_s=0.0, version=command.version))

    async def _hand_over(self, version: int) -> None:
        with self.bus.lock:
            living = self.engines.expect(Weights(version, None))
        within_s = None if self.engines.make is None else self.watch.deadlines.sync_s / 2
        weights = await _from(self.trainer, self.engines, version, living, within_s)
        if self.publish is not None:
            await _bring_to_hosts(self.publish, weights)
            with self.bus.lock:
                self.engines.expect(weights)
            return
        await self.devices.to_engines()
        with self.bus.lock:
            living = self.engines.expect(weights)
        for handle, error in (await _bring_all(living, weights, within_s)).items():
            if self.engines.make is None:
                raise error
            with self.bus.lock:
                self.engines.lose(handle, str(error))

    def _replace(self, command: Replace) -> None:
        self._start_filling(command.engine, command.incarnation, self.engines.layout)

    def _resize(self, command: Resize) -> None:
        gone = self.engines.lay_out(command.tensor_parallel)
        layout = self.engines.layout

        def work() -> None:
            asyncio.run(_close_all(gone))  # they leave their devices before others come
            for number, incarnation in enumerate(command.incarnations):
                self._start_filling(number, incarnation, layout)

        self.engines.ending.do(work, "rollpacker-resize")

    def _start_filling(self, number: int, incarnation: int, layout: EngineLayout) -> None:
        threading.Thread(
            target=self._fill,
            args=(number, incarnation, layout),
            name="rollpacker-new-engine",
            daemon=True,
        ).start()

    def _fill(self, number: int, incarnation: int, layout: EngineLayout) -> None:
        """Make an engine with this number and add it to the run; if that fails, tell the core.
        `incarnation`: count of earlier engines of this number. `layout`: has its number of
        devices."""
        engines, engine = self.engines, None
        assert engines.make is not None, f"engine {number}: nobody can make it"
        try:
            with self.devices.loading(number):
                engine = engines.make(number, incarnation, layout.tensor_parallel)
                with self.bus.lock:
                    engines.awaits(number, engine, layout)
                handle = Handle(number, incarnation, engine)
                while not self._joins(handle):
                    time.sleep(WRITTEN_S)
        except Exception as error:
            if engine is not None:
                engines.ending.close(engine)
            with self.bus.lock:
                engines.failed_to_join(number, incarnation, layout, error)

    def _joins(self, handle: Handle) -> bool:
        """Load the current weights into a new engine and add it to the run. Returns False, to be
        called again, if the weights change meanwhile."""
        engines = self.engines
        weights = engines.weights
        if weights.hand_over is None and not engines.is_closed:
            return False
        if weights.is_delivered:
            assert engines.deliveries is not None
            if engines.deliveries.asked is not weights:
                engines.deliveries.asked = weights
                self.main.later(partial(self._write, weights))
            return engines.is_closed
        try:
            bring_up_to_date(handle.engine, weights)
        except (EngineError, TrainerError):
            if engines.weights is weights:
                raise
            return False
        with self.bus.lock:
            if engines.is_closed:
                raise EngineError("the run is over")
            # An update that is applied and not handed over yet is awaited.
            if engines.weights is not weights or self.bus.job.version != weights.version:
                return False
            engines.join(handle)
        return True

    async def _write(self, weights: Weights) -> None:
        """Have the trainer write weights that were delivered, for engines that missed that; unless
        it has newer ones by now, which come to all engines anyway."""
        if self.engines.weights is weights and self.trainer.version == weights.version:
            written = Weights(weights.version, await self.trainer.hand_over())
            with self.bus.lock:
                if self.engines.weights is weights:
                    self.engines.weights = written


async def _close_all(engines: Sequence[Engine]) -> None:
    await asyncio.gather(*(engine.close() for engine in engines), return_exceptions=True)


async def hand_over_weights(trainer: Trainer, engines: Engines, version: int) -> None:
    """Bring the trainer's weights to all engines before a run begins. Raises an engine's error."""
    weights = await _from(trainer, engines, version, engines.living, None)
    await take_all_back(trainer, engines)
    for error in (await _bring_all(engines.expect(weights), weights)).values():
        raise error


async def _from(
    trainer: Trainer,
    engines: Engines,
    version: int,
    living: Sequence[Handle],
    within_s: float | None,
) -> Weights:
    """Return the trainer's weights, which the living engines have by then if they go straight to
    engines. `within_s`: most seconds that an engine may take for that; None: no limit."""
    if engines.deliveries is None or not living:
        return Weights(version, await trainer.hand_over())
    size = engines.layout.tensor_parallel
    return Weights(
        version, await engines.deliveries.bring(trainer, living, version, size, within_s)
    )


async def publish_weights(
    trainer: Trainer, engines: Engines, version: int, publish: Publish
) -> None:
    """Copy the trainer's weights to the engines' hosts before a run with shared devices begins, and
    release the trainer's devices. Engines load the weights when they get devices."""
    weights = Weights(version, await trainer.hand_over())
    await _bring_to_hosts(publish, weights)
    engines.expect(weights)
    await trainer.offload()


async def _bring_to_hosts(publish: Publish, weights: Weights) -> None:
    """Copy the weights to all hosts with engines. Of a host that cannot be reached there is only a
    warning: its engines ask for the weights later, and are lost if they get none."""
    assert weights.hand_over is not None
    source = weights.hand_over.weights
    if source is None or isinstance(source, Mapping):  # engines are in this process
        return
    try:
        failed = await in_daemon_thread(publish, source)
    except OSError as error:
        failed = {"the trainer's host": error}
    for host, why in failed.items():
        logger.warning("weights were not published to %s: %s", host, why)


async def _bring_all(
    handles: Sequence[Handle], weights: Weights, within_s: float | None = None
) -> dict[Handle, BaseException]:
    """Bring the weights to all these engines at once. Returns the errors of engines that failed, or
    took more than `within_s` seconds (None: no limit)."""
    arguments = {handle: (handle.engine, weights) for handle in handles}
    return await failures(bring_up_to_date, arguments, "take new weights", within_s)


def bring_up_to_date(engine: Engine, weights: Weights) -> None:
    """Load the trainer's weights into an engine, unless they were delivered, and check that they
    arrived. This runs in a thread of its own, so that a copy that hangs does not stop the event
    loop. Raises `EngineError`, also for an engine that computes with others (`Engine.compare`), and
    `TrainerError` if a hash of the engine's weights differs from the trainer's."""
    hand_over = weights.hand_over
    assert hand_over is not None
    if not weights.is_delivered:
        asyncio.run(engine.update_weights(weights.version, hand_over.weights))
    if hand_over.probe is None:  # the engine's tensors are the trainer's
        return
    found = engine.weight_probe()
    if found != hand_over.probe:
        raise TrainerError(
            f"the engine's weights are not the trainer's at version {weights.version} (probes "
            f"{found[:12]} and {hand_over.probe[:12]}): the transfer went wrong, or something else "
            "wrote to one of them. Nothing was generated with them; --resume loads both anew from "
            "the last checkpoint"
        )
    if hand_over.text:
        engine.compare(hand_over.text, hand_over.log_probs)
