"""Ends a step when the core commands `Commit`: evaluation, callbacks, checkpoint; then answers the
core with `Committed`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rollpacker.bus import Routes
from rollpacker.core.commands import Commit
from rollpacker.core.events import Committed
from rollpacker.data.dataset import Cursor
from rollpacker.run.folder.checkpoint import write_checkpoint
from rollpacker.run.folder.event_log import LogWriter
from rollpacker.run.folder.samples import SampleWriter
from rollpacker.run.ports.audience import Audience
from rollpacker.run.ports.carried import CarriedTokens, KeptByPrompt, write_carried
from rollpacker.run.ports.evaluation import Evaluator
from rollpacker.run.ports.pools import Pools
from rollpacker.run.ports.recovery import Recovery
from rollpacker.run.ports.salvage import Salvage
from rollpacker.run.ports.scoring import Scoring
from rollpacker.run.ports.shared import Shared
from rollpacker.run.ports.shared_devices import SharedDevices
from rollpacker.run.ports.waiting import in_daemon_thread

CLOSE_S = 10.0
"""Seconds that a checkpoint being written may still take when the run is ended at once."""


@dataclass(eq=False, slots=True)
class Commits:
    """Ends a step when the core commands `Commit`. The core's state and the tokens kept for later
    steps are read at once, since both may change before the checkpoint is written."""

    shared: Shared
    scoring: Scoring
    evaluator: Evaluator
    _: KW_ONLY
    recovery: Recovery
    """Restarts a lost trainer. Its `checkpoints` is the folder where checkpoints are written."""
    pools: Pools
    keep_last: int
    devices: SharedDevices
    """Lends devices to trainer or engines. Its `trainer` is the one that a checkpoint saves."""
    cursor: Cursor
    carried: CarriedTokens
    salvage: Salvage
    tokenizer: str
    """SHA-256 of the tokenizer's vocabulary, stored with kept tokens. Empty if it is not known."""
    log: LogWriter
    samples: SampleWriter | None
    audience: Audience

    def routes(self) -> Routes:
        return {Commit: self._on_commit}

    def _on_commit(self, command: Commit) -> None:
        state, waiting = self.shared.bus.job.state(), self.carried.settle()
        self.shared.main.later(partial(self._commit, command, state, waiting))

    async def _commit(
        self, command: Commit, job_state: Mapping[str, Any], waiting: KeptByPrompt
    ) -> None:
        with self.shared.bus.lock:
            self.shared.desk.forget(self.scoring.waiting())
        if command.evaluate:
            await self.evaluator.evaluate(command.step)
        await self.audience.trained(command.step)
        if command.checkpoint:
            await self.devices.to_replicas()
            save = partial(self._checkpoint, command.step, job_state, waiting)
            if not await self.recovery.through(save):
                return
            await self.devices.to_engines()
        self.shared.bus.take(
            Committed(time_s=0.0, step=command.step, checkpointed=command.checkpoint)
        )

    async def _checkpoint(
        self, step: int, job_state: Mapping[str, Any], waiting: KeptByPrompt
    ) -> None:
        """Write a checkpoint. If the trainer is lost, this part alone is repeated, not the
        evaluation."""
        await self.pools.parked()
        write = in_daemon_thread(self._write, step, self._state(job_state), waiting)
        try:
            await self.shared.watch.by("checkpoint_s", write)
        except asyncio.CancelledError:
            # The run is ended at once. Who resumes it must not meet a checkpoint in the making.
            await asyncio.wait({write}, timeout=CLOSE_S)
            raise

    def _write(self, step: int, state: dict[str, Any], waiting: KeptByPrompt) -> None:
        save = partial(self._save, waiting)
        folder = self.recovery.checkpoints
        written = write_checkpoint(folder, step, state, save, self.keep_last, run=folder.parent)
        with self.shared.bus.lock:
            self.salvage.begin(written, self.shared.bus.job.version)

    def _save(self, waiting: KeptByPrompt, folder: Path) -> None:
        self.devices.trainer.save(folder)
        write_carried(folder, waiting, self.tokenizer)

    def _state(self, job_state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what a resume needs besides tensors: states of core, data cursor and clock, and
        the event log's size and hash. Log and samples are written durably first."""
        if self.samples is not None:
            self.samples.write()
        with self.shared.bus.lock:
            return {
                "job": job_state,
                "cursor": self.cursor.state(),
                **self.log.mark(),
                "time_s": self.shared.bus.clock.now(),
            }
