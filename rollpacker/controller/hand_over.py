"""The way of new weights to the engine: `SyncWeights` in, `WeightsSynced` out."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial

from rollpacker.bus import Bus, Routes
from rollpacker.controller.main_task import MainTask
from rollpacker.controller.waiting import in_daemon_thread
from rollpacker.controller.watch import Watch
from rollpacker.core.commands import SyncWeights
from rollpacker.core.events import WeightsSynced
from rollpacker.rollout.engine import Engine
from rollpacker.trainer.trainer import Trainer, TrainerError


@dataclass(frozen=True, slots=True)
class HandingOver:
    """Brings the engine to the trainer's weights, on the main task."""

    bus: Bus
    main: MainTask
    watch: Watch
    trainer: Trainer
    engine: Engine

    def routes(self) -> Routes:
        return {SyncWeights: lambda command: self.main.later(partial(self._sync, command))}

    async def _sync(self, command: SyncWeights) -> None:
        hand_over = hand_over_weights(self.trainer, self.engine, command.version)
        await self.watch.by("sync_s", hand_over)
        self.bus.take(WeightsSynced(time_s=0.0, version=command.version))


async def hand_over_weights(trainer: Trainer, engine: Engine, version: int) -> None:
    """Bring the engine to the trainer's weights, and see that they have arrived.

    The engine copies in a thread of its own, so that a copy that hangs can be given up: on the
    event loop it would keep the deadline itself from being noticed.

    Raises `TrainerError` if a fixed sample of them differs afterwards.
    """
    hand_over = await trainer.hand_over()
    await in_daemon_thread(asyncio.run, engine.update_weights(version, hand_over.weights))
    if hand_over.probe is None:  # the engine's tensors are the trainer's
        return
    found = await in_daemon_thread(engine.weight_probe)
    if found != hand_over.probe:
        raise TrainerError(
            f"the engine's weights are not the trainer's at version {version} (probes {found[:12]} "
            f"and {hand_over.probe[:12]}): the transfer went wrong, or something else wrote to one "
            "of them. Nothing was generated with them; --resume loads both anew from the last "
            "checkpoint"
        )
