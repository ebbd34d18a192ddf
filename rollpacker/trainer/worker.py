"""A process of the trainer: one rank, which does what the run's own process asks, call by call.

The first call, `setup`, joins the other ranks and loads the models. Later calls train, score and
save (`calls.METHODS` lists all). The process ends when its connection to the run does, whatever it
is doing: a run that is killed leaves no process behind."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollpacker.pipeline.stages.overseer import Arrangement
from rollpacker.trainer.calls import METHODS, codec, error_bytes
from rollpacker.trainer.flops import peak_flops
from rollpacker.trainer.launch import line_to_run
from rollpacker.trainer.setup import LearnerSetup
from rollpacker.trainer.trainer import ScoreRequest, TrainSample
from rollpacker.weights.buffer import BufferLayout, WeightBuffer
from rollpacker.weights.delivery import Delivery, Member, UndeliveredError
from rollpacker.workers.kinds import ANSWER, ERROR
from rollpacker.workers.line import LINE_FD, LineEnded
from rollpacker.workers.program import answer_calls, begin_quietly

if TYPE_CHECKING:
    from rollpacker.weights.probe import Samples

TIMEOUT_S = 3600.0
"""Seconds that a rank waits for others in a collective; the run's own deadlines are shorter."""


class Worker:
    """The methods of a rank that the run's own process calls: those in `calls.METHODS`."""

    def __init__(self) -> None:
        self._buffer: WeightBuffer | None = None
        self._member = Member()

    def setup(self, setup: LearnerSetup) -> list[tuple[int, str]]:
        """Join the other ranks, and build this rank's learner (models and optimizer) from its
        settings. Returns what was logged meanwhile, as levels and lines: a rank has no log."""
        with _logged() as lines:
            self._set_up(setup)
        return lines

    def _set_up(self, setup: LearnerSetup) -> None:
        import torch

        from rollpacker.trainer.setup import build_learner
        from rollpacker.trainer.sharding import join

        if setup.threads is not None:
            torch.set_num_threads(setup.threads)
        device = setup.device()
        several = int(os.environ["WORLD_SIZE"]) > 1
        shards = None
        if several:
            train = setup.train
            shards = join(device, TIMEOUT_S, replicas=train.replicas, stages=train.pipeline.stages)
        self._learner = build_learner(setup, shards=shards)

    def score(self, requests: Sequence[ScoreRequest]) -> Any:
        return self._learner.score(requests)

    def accumulate(self, samples: Sequence[TrainSample]) -> None:
        self._learner.accumulate(samples)

    def discard(self) -> None:
        self._learner.discard()

    def rescale(self, factor: float) -> None:
        self._learner.rescale(factor)

    def update(self) -> Any:
        """Make an update that is not the step's last. Returns the `StepOutcome` of this rank, and
        its device's peak FLOP/s (None: not known)."""
        return self._learner.update(), peak_flops(self._learner.device)

    def apply(self) -> Any:
        """Make the step's last update. Returns the `StepOutcome` of this rank, and its device's
        peak FLOP/s (None: not known)."""
        return self._learner.apply(), peak_flops(self._learner.device)

    def arrange(self, arrangement: Arrangement) -> None:
        self._learner.arrange(arrangement)

    def save(self, folder: Path) -> None:
        self._learner.save(folder)

    def load(self, folder: Path) -> int:
        """Load a checkpoint from `folder`, and return its version (number of steps)."""
        self._learner.load(folder)
        return self._learner.version

    def map_weights(self, layout: BufferLayout | None) -> None:
        """Map the shared memory that holds the weights as `layout` says, for `write_weights` to
        write to. None: this rank writes nothing."""
        self._buffer = None if layout is None else WeightBuffer(layout)

    def write_weights(self) -> tuple[str | None, int]:
        """Copy the weights to the shared memory: every rank takes part, rank 0 writes. Returns on
        rank 0 a hash of a fixed sample of the weights, on other ranks None; and the bytes that were
        written to host memory."""
        if self._buffer is None:
            return self._learner.write_weights(None)
        with self._buffer.writing(self._learner.version) as tensors:
            return self._learner.write_weights(tensors)

    def send_weights(self, delivery: Delivery) -> Samples | str:
        """Send this rank's part of the weights to engines. Returns what was sampled of it (nothing
        in replicas that send none), or a sentence if it was not delivered."""
        if int(os.environ["RANK"]) >= delivery.senders:
            return {}
        try:
            return self._learner.send_weights(delivery, self._member)
        except UndeliveredError as error:
            return str(error)

    def log_probs_of(self, text: Sequence[int]) -> tuple[float, ...]:
        return self._learner.log_probs_of(text)

    def offload(self) -> None:
        self._learner.offload()

    def reload(self) -> None:
        self._learner.reload()

    def hashes(self) -> dict[str, str]:
        return self._learner.state_hashes()


@contextmanager
def _logged() -> Iterator[list[tuple[int, str]]]:
    """A context that collects the levels and texts of what the package logs."""
    lines: list[tuple[int, str]] = []

    class Collecting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append((record.levelno, record.getMessage()))

    package, handler = logging.getLogger("rollpacker"), Collecting()
    package.addHandler(handler)
    level, package.propagate = package.level, False
    package.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        package.setLevel(level)
        package.propagate = True
        package.removeHandler(handler)


def _obeyed(worker: Worker, call: bytes) -> tuple[int, bytes]:
    try:
        method, arguments = codec().decode(call)
        assert method in METHODS, method
        return ANSWER, codec().encode(getattr(worker, method)(*arguments))
    except Exception as error:
        return ERROR, error_bytes(error)


def main() -> None:
    begin_quietly()
    faulthandler.register(signal.SIGUSR1)
    # Takes seconds, while the run loads its own: it answers to a connection only after that.
    import rollpacker.trainer.learner  # noqa: F401

    is_torchruns = LINE_FD not in os.environ
    try:
        line = line_to_run()
    except (OSError, LineEnded) as error:
        sys.exit(f"rollpacker: the trainer cannot reach its run: {error}")
    if is_torchruns:  # it is told what the run's process is told,
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which ends the step first, with all ranks
    answer_calls(line, partial(_obeyed, Worker()))


if __name__ == "__main__":
    main()
