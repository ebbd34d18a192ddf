"""What a step ends with: `Commit` in, `Committed` out, and between them evaluation and
checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rollpacker.bus import Bus, Routes
from rollpacker.controller.checkpoint import write_checkpoint
from rollpacker.controller.desk import Desk
from rollpacker.controller.evaluation import Evaluator
from rollpacker.controller.event_log import LogWriter
from rollpacker.controller.main_task import MainTask
from rollpacker.controller.samples import SampleWriter
from rollpacker.controller.scoring import Scoring
from rollpacker.controller.waiting import in_daemon_thread
from rollpacker.controller.watch import Watch
from rollpacker.core.commands import Commit
from rollpacker.core.events import Committed
from rollpacker.data.base import Cursor
from rollpacker.trainer.base import Trainer


class Commits:
    """Commits on the main task. The job's state is taken at once, in whatever thread the command
    comes: later it may have gone on."""

    def __init__(
        self,
        bus: Bus,
        main: MainTask,
        desk: Desk,
        scoring: Scoring,
        watch: Watch,
        evaluator: Evaluator,
        *,
        folder: Path,
        keep_last: int,
        trainer: Trainer,
        cursor: Cursor,
        log: LogWriter,
        samples: SampleWriter | None,
    ) -> None:
        """`folder` takes the checkpoints, of which the last `keep_last` stay."""
        self._bus, self._main, self._desk = bus, main, desk
        self._scoring, self._watch, self._evaluator = scoring, watch, evaluator
        self._folder = folder
        self._keep_last = keep_last
        self._trainer = trainer
        self._cursor = cursor
        self._log = log
        self._samples = samples

    def routes(self) -> Routes:
        return {Commit: self._on_commit}

    def _on_commit(self, command: Commit) -> None:
        self._main.later(partial(self._commit, command, self._bus.job.state()))

    async def _commit(self, command: Commit, job_state: Mapping[str, Any]) -> None:
        with self._bus.lock:
            self._desk.forget(self._scoring.waiting())
        if command.evaluate:
            await self._evaluator.evaluate(command.step)
        if command.checkpoint:
            write = in_daemon_thread(
                write_checkpoint,
                self._folder,
                command.step,
                self._state(job_state),
                self._trainer.save,
                self._keep_last,
            )
            await self._watch.by("checkpoint_s", write)
        self._bus.take(Committed(time_s=0.0, step=command.step, checkpointed=command.checkpoint))

    def _state(self, job_state: Mapping[str, Any]) -> dict[str, Any]:
        """All that a resume needs besides tensors; also makes log and samples durable up to
        here."""
        if self._samples is not None:
            self._samples.write()
        with self._bus.lock:
            return {
                "job": job_state,
                "cursor": self._cursor.state(),
                **self._log.mark(),
                "time_s": self._bus.clock.now(),
            }
