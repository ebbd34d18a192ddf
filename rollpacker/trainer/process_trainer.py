"""The trainer in processes of its own: it works while the engine generates.

Samples are dealt out to the ranks by the work that they are; every rank adds up its own, and
`apply` brings them together. Of several replicas (`train.replicas`) some may be asked alone.
Engines have copies of the weights, which are brought up to date through memory that rank 0 writes
and they read.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from rollpacker.trainer.balance import assign
from rollpacker.trainer.launch import Ranks
from rollpacker.trainer.outcome import step_metrics
from rollpacker.trainer.setup import LearnerSetup
from rollpacker.trainer.trainer import (
    HandOver,
    NonFiniteError,
    ScoreRequest,
    TokenScores,
    TrainerProcessError,
    TrainSample,
)
from rollpacker.weight_buffer import WeightBuffer

Result = TypeVar("Result")


class ProcessTrainer:
    """Meets `Trainer` (trainer/trainer.py). Calls must not overlap; the driver awaits each.

    `ranks` are started and not yet connected; they end with the trainer. `engine_weights` are what
    the engine's copy consists of: names, shapes and dtypes. Raises `TrainerProcessError` if a
    process ends, then or in any later call.
    """

    def __init__(
        self, setup: LearnerSetup, ranks: Ranks, engine_weights: Iterable[tuple[str, Tensor]]
    ) -> None:
        self.version = 0
        self._ranks = ranks
        self._replicas = setup.train.replicas
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")
        try:
            ranks.connect()
            self._all("setup", setup)
            self._buffer = WeightBuffer.create(engine_weights)
            others = [None] * (ranks.num_processes - 1)
            self._ranks.call("map_weights", [(x,) for x in (self._buffer.layout, *others)])
        except BaseException:
            self.close()
            raise

    async def score(
        self, requests: Sequence[ScoreRequest], replicas: Sequence[int] | None = None
    ) -> list[TokenScores]:
        """See `Trainer`."""
        shares = self._shares(requests, replicas)

        def score() -> list[TokenScores]:
            parts = self._ranks.call(
                "score", [([requests[i] for i in s],) for s in shares.values()], [*shares]
            )
            scores: dict[int, TokenScores] = {}
            for share, part in zip(shares.values(), parts, strict=True):
                scores.update(zip(share, part, strict=True))
            return [scores[i] for i in range(len(requests))]

        return await self._in_thread(score)

    async def accumulate(
        self, samples: Sequence[TrainSample], replicas: Sequence[int] | None = None
    ) -> None:
        """See `Trainer`."""
        ordered = sorted(samples, key=lambda sample: sample.sample)
        shares = self._shares(ordered, replicas)

        def accumulate() -> None:
            arguments = [([ordered[i] for i in share],) for share in shares.values()]
            try:
                self._ranks.call("accumulate", arguments, [*shares])
            except NonFiniteError:
                if self._replicas > 1:  # the others do not know of it
                    with contextlib.suppress(TrainerProcessError):
                        self._all("discard")
                raise

        await self._in_thread(accumulate)

    async def rescale(self, factor: float) -> None:
        """See `Trainer`."""
        await self._in_thread(lambda: self._all("rescale", factor))

    async def update(self) -> Mapping[str, float]:
        """See `Trainer`."""

        def update() -> Mapping[str, float]:
            outcomes = self._all("update")
            return step_metrics([outcome for outcome, _ in outcomes], outcomes[0][1])

        return await self._in_thread(update)

    async def apply(self) -> Mapping[str, float]:
        """See `Trainer`. Raises `TrainerError` if nothing was accumulated."""

        def apply() -> Mapping[str, float]:
            outcomes = self._all("apply")
            self.version += 1
            return step_metrics([outcome for outcome, _ in outcomes], outcomes[0][1])

        return await self._in_thread(apply)

    async def hand_over(self) -> HandOver:
        """See `Trainer`."""

        def write() -> HandOver:
            probe, *_ = self._all("write_weights")
            return HandOver(weights=self._buffer.source(self.version), probe=probe)

        return await self._in_thread(write)

    async def offload(self) -> None:
        """See `Trainer`."""
        await self._in_thread(lambda: self._all("offload"))

    async def reload(self, replicas: Sequence[int] | None = None) -> None:
        """See `Trainer`."""
        ranks = self._ranks_of(replicas)
        await self._in_thread(lambda: self._ranks.call("reload", [()] * len(ranks), ranks))

    def save(self, folder: Path) -> None:
        """See `Trainer`."""
        self._all("save", folder)

    def load(self, folder: Path) -> None:
        """See `Trainer`. Raises `TrainerError` if what lies there is not this model's."""
        self.version = self._all("load", folder)[0]

    def close(self) -> None:
        """End thread and processes. Idempotent."""
        self._ranks.close()
        self._executor.shutdown(wait=False)

    @property
    def pids(self) -> list[int]:
        """The process ids, by rank."""
        return [rank.pid for rank in self._ranks.all]

    def _shares(
        self,
        rows: Sequence[ScoreRequest] | Sequence[TrainSample],
        replicas: Sequence[int] | None,
    ) -> dict[int, list[int]]:
        """Return the rows that each rank of these replicas takes, by their place in `rows`."""
        lengths = [len(row.prompt_tokens) + len(row.response_tokens) for row in rows]
        ranks = self._ranks_of(replicas)
        return dict(zip(ranks, assign(lengths, len(ranks)), strict=True))

    def _ranks_of(self, replicas: Sequence[int] | None) -> list[int]:
        size = len(self._ranks.all) // self._replicas
        numbers = range(self._replicas) if replicas is None else sorted(replicas)
        return [rank for r in numbers for rank in range(r * size, (r + 1) * size)]

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        return self._ranks.call(method, [arguments] * len(self._ranks.all))

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)
