"""Restarts a lost trainer: tells `TrainerLost`, carries out `RestoreTrainer`, tells `TrainerReady`.

    work on the main task -> RanksLost -> TrainerLost -> the core -> RestoreTrainer
        new processes, last checkpoint, the updates since -> TrainerReady -> the work, from its
        beginning

The main task does nothing else meanwhile, while engines and rewards go on. The desk keeps the
step's samples until the step is committed.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

from rollpacker.bus import Bus, Routes
from rollpacker.core.commands import RestoreTrainer
from rollpacker.core.events import TrainerLost, TrainerReady
from rollpacker.run.folder.checkpoint import has_checkpoint, newest_checkpoint
from rollpacker.run.ports.desk import Desk
from rollpacker.run.ports.main_task import Deed
from rollpacker.run.ports.pools import Pools
from rollpacker.run.ports.waiting import in_daemon_thread
from rollpacker.run.ports.watch import Watch
from rollpacker.trainer.trainer import RanksLost, Trainer

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Recovery:
    """Restarts the trainer when its processes are lost. Used on the main task (does slow work)."""

    bus: Bus
    desk: Desk
    watch: Watch
    pools: Pools
    trainer: Trainer
    checkpoints: Path
    _incarnation: int = field(default=0, init=False)
    _order: RestoreTrainer | None = field(default=None, init=False)
    """The core's command to restore the trainer, until it is carried out. None at other times."""
    _num_signs: int = field(default=0, init=False)
    """Number of times that the restarting trainer reported progress, which extends its deadline."""

    def routes(self) -> Routes:
        return {RestoreTrainer: self._on_restore}

    def _on_restore(self, command: RestoreTrainer) -> None:
        self._order = command

    async def through(self, deed: Deed) -> bool:
        """Do this piece of slow work, such as an update of weights. If the trainer is lost in it,
        restart the trainer and do it all again. Returns False if the core has ended the run."""
        while True:
            try:
                await deed()
                return True
            except RanksLost as error:
                if not await self._bring_back(error.reason):
                    return False

    async def look(self) -> None:
        """Restart the trainer if it was lost while the main task had nothing to do. Does nothing
        while other jobs may have the trainer's devices."""
        reason = self.trainer.how_lost() if self.pools.has("train") else None
        if reason is not None:
            await self._bring_back(reason)

    async def _bring_back(self, reason: str) -> bool:
        """Restart the trainer until that succeeds. Returns False if the core has ended the run."""
        order = self._order_after(reason)
        if order is None:
            return False
        async with self.pools.borrowed("train", "recovery"):
            while True:
                try:
                    await self._restore(order)
                    break
                except RanksLost as error:
                    order = self._order_after(error.reason)
                    if order is None:
                        return False
            ready = TrainerReady(
                time_s=0.0, incarnation=order.incarnation, version=self.trainer.version
            )
            self.bus.take(ready)
        return True

    def _order_after(self, reason: str) -> RestoreTrainer | None:
        """Tell the core that the trainer is lost. Returns the core's command to restore it, or None
        if the run is over."""
        logger.warning("%s; the trainer is started anew", reason)
        self.bus.take(TrainerLost(time_s=0.0, incarnation=self._incarnation, reason=reason))
        order, self._order = self._order, None
        if order is not None:
            self._incarnation = order.incarnation
            with self.bus.lock:
                self.desk.forget_gradients()
        return order

    async def _restore(self, order: RestoreTrainer) -> None:
        checkpoint = None
        if has_checkpoint(self.checkpoints):
            found = await in_daemon_thread(newest_checkpoint, self.checkpoints)
            checkpoint = found.folder
        signs = self._num_signs

        def lives() -> bool:
            nonlocal signs
            before, signs = signs, self._num_signs
            return signs != before

        what = f"the trainer to be brought back to version {order.version} of the weights"
        await self.watch.by("train_s", self.trainer.restore(checkpoint, self._tell), what, lives)

    def _tell(self) -> None:
        self._num_signs += 1
