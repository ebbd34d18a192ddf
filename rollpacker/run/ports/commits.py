"""The port of the end of a step: `Commit` in, `Committed` out, and between them evaluation and
checkpoint."""

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
"""Seconds that the writing of a checkpoint may still take when the run is ended at once."""


@dataclass(eq=False, slots=True)
class Commits:
    """Commits steps on the main task. The job's state and the carried tokens are read at once, in
    the thread of the command, since both may change before the checkpoint."""

    shared: Shared
    scoring: Scoring
    evaluator: Evaluator
    _: KW_ONLY
    recovery: Recovery
    """Brings a lost trainer back; knows the checkpoints' folder, where the last `keep_last`
    stay."""
    pools: Pools
    keep_last: int
    devices: SharedDevices
    """The devices that trainer and engines share, and the trainer on them."""
    cursor: Cursor
    carried: CarriedTokens
    salvage: Salvage
    tokenizer: str
    """Fingerprint of the tokenizer."""
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
        """Write a checkpoint. It alone, not evaluation or callbacks, is done again if the trainer
        is lost."""
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
        """Returns all that a resume needs besides tensors: job, data cursor, clock, and the log's
        mark. Also makes log and samples durable up to here."""
        if self.samples is not None:
            self.samples.write()
        with self.shared.bus.lock:
            return {
                "job": job_state,
                "cursor": self.cursor.state(),
                **self.log.mark(),
                "time_s": self.shared.bus.clock.now(),
            }
