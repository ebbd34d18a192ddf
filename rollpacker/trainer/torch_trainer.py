"""The trainer in the run's own process: a learner whose thread leaves the event loop free."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from rollpacker.trainer.flops import peak_flops
from rollpacker.trainer.learner import Learner
from rollpacker.trainer.outcome import step_metrics
from rollpacker.trainer.trainer import HandOver, ScoreRequest, TokenScores, TrainSample
from rollpacker.weights.buffer import WeightBuffer
from rollpacker.weights.delivery import Delivery, Member
from rollpacker.weights.probe import digest_of, weight_probe

Result = TypeVar("Result")


class TorchTrainer:
    """A `Trainer` (trainer/trainer.py) in the run's own process. Calls must not overlap. With
    `in_place` an engine reads the learner's own tensors. Otherwise engines have copies, which with
    `shared` are updated through memory that other processes can read, and compare their log-probs
    of the tokens of `text` with the learner's. `threads` is torch's number
    of threads for this trainer's work on a CPU; None: torch's default. Raises `ValueError` if there
    is no room for shared weights."""

    def __init__(
        self,
        learner: Learner,
        *,
        in_place: bool = True,
        shared: bool = False,
        text: tuple[int, ...] = (),
        threads: int | None = None,
    ) -> None:
        assert not (in_place and shared)
        self.learner = learner
        self._in_place = in_place
        self._text = text
        self._buffer = WeightBuffer.create(learner.weights()) if shared else None
        self._member = Member()
        self._executor = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="trainer",
            initializer=None if threads is None else partial(torch.set_num_threads, threads),
        )

    @property
    def version(self) -> int:
        return self.learner.version

    async def score(
        self, requests: Sequence[ScoreRequest], replicas: Sequence[int] | None = None
    ) -> list[TokenScores]:
        """Return the scores (log-probs, values) of the responses, in order. `replicas` has no
        effect, since there is one replica."""
        return await self._in_thread(lambda: self.learner.score(requests))

    async def accumulate(
        self, samples: Sequence[TrainSample], replicas: Sequence[int] | None = None
    ) -> None:
        """Add the gradient of these samples to the step's. `replicas` has no effect, since there is
        one replica. Raises `NonFiniteError` for a loss or an advantage that is not finite."""
        await self._in_thread(lambda: self.learner.accumulate(samples))

    async def rescale(self, factor: float) -> None:
        """Multiply the gradient and the losses accumulated so far by `factor`, which corrects
        provisional loss weights."""
        await self._in_thread(lambda: self.learner.rescale(factor))

    async def update(self) -> Mapping[str, float]:
        """Make one of the step's updates that is not the last, and return the update's metrics."""

        def update() -> Mapping[str, float]:
            return step_metrics([self.learner.update()], peak_flops(self.learner.device))

        return await self._in_thread(update)

    async def apply(self) -> Mapping[str, float]:
        """Make the step's last update, and return its metrics. Raises `TrainerError` if nothing was
        accumulated."""

        def apply() -> Mapping[str, float]:
            return step_metrics([self.learner.apply()], peak_flops(self.learner.device))

        return await self._in_thread(apply)

    @property
    def holders(self) -> tuple[int, ...]:
        """Return this process's id; see `Trainer.holders`."""
        return (os.getpid(),)

    async def hand_over(self, delivery: Delivery | None = None) -> HandOver:
        """Return the weights for an engine that keeps its own copy, and a hash to check the copy
        by, or send them to engines; see `Trainer.hand_over`. Weights and hash are None if the
        engine reads the learner's own tensors."""

        if self._in_place:
            return HandOver(weights=None, probe=None)

        def weights() -> HandOver:
            if self._buffer is not None:
                source, size = None, 0
                if delivery is None:
                    with self._buffer.writing(self.version) as tensors:
                        probe, size = self.learner.write_weights(tensors)
                    source = self._buffer.layout.source(self.version)
                else:
                    probe = digest_of([self.learner.send_weights(delivery, self._member)])
                said = self.learner.log_probs_of(self._text) if self._text else ()
                return HandOver(
                    weights=source,
                    probe=probe,
                    text=self._text,
                    log_probs=said,
                    is_delivered=delivery is not None,
                    host_bytes=size,
                )
            named = dict(self.learner.weights())
            return HandOver(weights=named, probe=weight_probe(named.items()))

        return await self._in_thread(weights)

    async def offload(self) -> None:
        """Move models, gradients and optimizer state to host memory. `reload` must be called before
        the next call that computes."""
        await self._in_thread(self.learner.offload)

    async def reload(self, replicas: Sequence[int] | None = None) -> None:
        """Move what `offload` moved back to the device. `replicas` has no effect, since there is
        one replica."""
        await self._in_thread(self.learner.reload)

    def save(self, folder: Path) -> None:
        """Write a checkpoint (model, optimizer, version) to `folder`."""
        self.learner.save(folder)

    def load(self, folder: Path) -> None:
        """Restore a checkpoint from `folder`. Raises `TrainerError` if it is another model's."""
        self.learner.load(folder)

    def how_lost(self) -> None:
        """Return None, as this trainer cannot be lost: it is in the run's own process."""

    async def restore(self, checkpoint: Path | None, tell: Callable[[], None]) -> None:
        """Raise `AssertionError`: this trainer cannot be lost, so there is nothing to restore."""
        raise AssertionError("a trainer in the run's own process cannot be lost")

    def close(self) -> None:
        """End the trainer's thread after its present call, without waiting for that. Idempotent."""
        self._executor.shutdown(wait=False)

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)
