"""The trainer in the run's own process: a learner with a thread of its own, so that the caller's
event loop stays free."""

from __future__ import annotations

import asyncio
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
from rollpacker.weights.probe import weight_probe

Result = TypeVar("Result")


class TorchTrainer:
    """Meets `Trainer` (trainer/trainer.py). Calls must not overlap; the driver awaits each.

    `in_place`: an engine reads the learner's own tensors. Otherwise engines have copies: those in
    other processes with `shared`, through memory that all can read. `threads` is torch's number of
    threads for this trainer's work on a CPU.

    Raises `ValueError` if there is no room for shared weights.
    """

    def __init__(
        self,
        learner: Learner,
        *,
        in_place: bool = True,
        shared: bool = False,
        threads: int | None = None,
    ) -> None:
        assert not (in_place and shared)
        self.learner = learner
        self._in_place = in_place
        self._buffer = WeightBuffer.create(learner.weights()) if shared else None
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
        """See `Trainer`. There is one replica."""
        return await self._in_thread(lambda: self.learner.score(requests))

    async def accumulate(
        self, samples: Sequence[TrainSample], replicas: Sequence[int] | None = None
    ) -> None:
        """See `Trainer`. There is one replica. Also raises `NonFiniteError` for an advantage that
        is no finite number."""
        await self._in_thread(lambda: self.learner.accumulate(samples))

    async def rescale(self, factor: float) -> None:
        """See `Trainer`."""
        await self._in_thread(lambda: self.learner.rescale(factor))

    async def update(self) -> Mapping[str, float]:
        """See `Trainer`."""

        def update() -> Mapping[str, float]:
            return step_metrics([self.learner.update()], peak_flops(self.learner.device))

        return await self._in_thread(update)

    async def apply(self) -> Mapping[str, float]:
        """See `Trainer`. Raises `TrainerError` if nothing was accumulated."""

        def apply() -> Mapping[str, float]:
            return step_metrics([self.learner.apply()], peak_flops(self.learner.device))

        return await self._in_thread(apply)

    async def hand_over(self) -> HandOver:
        """See `Trainer`."""

        if self._in_place:
            return HandOver(weights=None, probe=None)

        def weights() -> HandOver:
            if self._buffer is not None:
                with self._buffer.writing(self.version) as tensors:
                    probe = self.learner.write_weights(tensors)
                return HandOver(weights=self._buffer.layout.source(self.version), probe=probe)
            named = dict(self.learner.weights())
            return HandOver(weights=named, probe=weight_probe(named.items()))

        return await self._in_thread(weights)

    async def offload(self) -> None:
        """See `Trainer`."""
        await self._in_thread(self.learner.offload)

    async def reload(self, replicas: Sequence[int] | None = None) -> None:
        """See `Trainer`. There is one replica."""
        await self._in_thread(self.learner.reload)

    def save(self, folder: Path) -> None:
        """See `Trainer`."""
        self.learner.save(folder)

    def load(self, folder: Path) -> None:
        """See `Trainer`. Raises `TrainerError` if what lies there is not this model's."""
        self.learner.load(folder)

    def how_lost(self) -> None:
        """See `Trainer`. It lives as long as the run's own process."""

    async def restore(self, checkpoint: Path | None, tell: Callable[[], None]) -> None:
        """See `Trainer`. Nobody needs it."""
        raise AssertionError("a trainer in the run's own process cannot be lost")

    def close(self) -> None:
        """End the thread once it is done with what it is at; a call that hangs is not waited for.
        Idempotent."""
        self._executor.shutdown(wait=False)

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)
