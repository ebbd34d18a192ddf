"""The trainer in processes of its own: it works while the engine generates.

Samples are dealt out to the ranks by the work that they are; every rank adds up its own, and
`apply` brings them together. Of several replicas (`train.replicas`) some may be asked alone.
Engines have copies of the weights, which are brought up to date through memory of rank 0's host
that it writes and they read. Where a rank is lost, others are started, which take the last
checkpoint and are told once more what has happened since (`journal.py`); the memory is not theirs
and stays.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from rollpacker.core.packs import assign
from rollpacker.trainer.calls import codec
from rollpacker.trainer.journal import Journal
from rollpacker.trainer.launch import Ranks
from rollpacker.trainer.outcome import step_metrics
from rollpacker.trainer.setup import LearnerSetup
from rollpacker.trainer.trainer import (
    HandOver,
    NonFiniteError,
    RanksLost,
    ScoreRequest,
    TokenScores,
    TrainerProcessError,
    TrainSample,
)
from rollpacker.weight_buffer import BufferLayout, WeightSource

Result = TypeVar("Result")


class ProcessTrainer:
    """Meets `Trainer` (trainer/trainer.py). Calls must not overlap; the driver awaits each.

    `ranks` are started and not yet connected; they end with the trainer. `engine_weights` are what
    the engine's copy consists of: names, shapes and dtypes. `journal_in`: see `Journal`. Raises
    `TrainerProcessError` if a process ends, then or in any later call.
    """

    def __init__(
        self,
        setup: LearnerSetup,
        ranks: Ranks,
        engine_weights: Iterable[tuple[str, Tensor]],
        journal_in: Path | None = None,
    ) -> None:
        self.version = 0
        self._setup = setup
        self._ranks = ranks
        self._journal = Journal(journal_in)
        self._replicas = setup.train.replicas
        self._stages = setup.train.pipeline.stages
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")
        try:
            ranks.connect()
            self._all("setup", setup)
            self._layout = BufferLayout.of(engine_weights)
            self._map_weights()
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
            # Of a pipeline's stages the last one answers; the others give empty lists.
            answered = list(zip(shares.values(), parts, strict=True))[
                -(len(parts) // self._stages) :
            ]
            for share, part in answered:
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
                self._change("accumulate", arguments, [*shares])
            except NonFiniteError:
                if self._replicas > 1:  # the others do not know of it
                    with contextlib.suppress(TrainerProcessError):
                        self._all("discard")
                raise

        await self._in_thread(accumulate)

    async def rescale(self, factor: float) -> None:
        """See `Trainer`."""
        await self._in_thread(lambda: self._change_all("rescale", factor))

    async def update(self) -> Mapping[str, float]:
        """See `Trainer`."""

        def update() -> Mapping[str, float]:
            outcomes = self._change_all("update")
            return step_metrics([outcome for outcome, _ in outcomes], outcomes[0][1])

        return await self._in_thread(update)

    async def apply(self) -> Mapping[str, float]:
        """See `Trainer`. Raises `TrainerError` if nothing was accumulated."""

        def apply() -> Mapping[str, float]:
            outcomes = self._change_all("apply")
            self._journal.finish_step()
            self.version += 1
            return step_metrics([outcome for outcome, _ in outcomes], outcomes[0][1])

        return await self._in_thread(apply)

    async def hand_over(self) -> HandOver:
        """See `Trainer`."""

        def write() -> HandOver:
            probe, *_ = self._all("write_weights")
            weights = WeightSource(version=self.version, layout=self._layout)
            return HandOver(weights=weights, probe=probe)

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
        self._journal.saved(self.version)

    def load(self, folder: Path) -> None:
        """See `Trainer`. Raises `TrainerError` if what lies there is not this model's."""
        self.version = self._all("load", folder)[0]
        self._journal.loaded(self.version)

    def how_lost(self) -> str | None:
        """See `Trainer`."""
        return self._ranks.how_lost()

    async def restore(self, checkpoint: Path | None, tell: Callable[[], None]) -> None:
        """See `Trainer`. Raises `TrainerProcessError`, too, if the checkpoint is too old."""

        def restore() -> None:
            self._ranks.start_anew()
            self._ranks.connect()
            tell()
            self._all("setup", self._setup)
            self._map_weights()
            tell()
            version = 0 if checkpoint is None else self._all("load", checkpoint)[0]
            for call in self._journal.since(version):
                tell()
                self._ranks.send(call.method, call.calls, call.numbers)
                version += call.method == "apply"
            assert version == self.version, (version, self.version)

        await self._in_thread(restore)

    def close(self) -> None:
        """End thread and processes. Idempotent."""
        self._ranks.close()
        self._journal.close()
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
        """Return the rows that each rank of these replicas takes, by their place in `rows`. All
        stages take the same."""
        lengths = [len(row.prompt_tokens) + len(row.response_tokens) for row in rows]
        ranks = self._ranks_of(replicas)
        shares = assign(lengths, len(ranks) // self._stages)
        return dict(zip(ranks, shares * self._stages, strict=True))

    def _ranks_of(self, replicas: Sequence[int] | None) -> list[int]:
        size = len(self._ranks.all) // self._replicas
        numbers = range(self._replicas) if replicas is None else sorted(replicas)
        return [rank for r in numbers for rank in range(r * size, (r + 1) * size)]

    def _map_weights(self) -> None:
        try:
            self._layout = self._ranks.hold(self._layout)
        except OSError as error:  # the host is lost, and rank 0 with it
            raise RanksLost(str(error)) from error
        others = [None] * (self._ranks.num_processes - 1)
        self._ranks.call("map_weights", [(x,) for x in (self._layout, *others)])

    def _change_all(self, method: str, *arguments: Any) -> list[Any]:
        return self._change(method, [arguments] * len(self._ranks.all))

    def _change(
        self, method: str, arguments: Sequence[tuple[Any, ...]], numbers: Sequence[int] = ()
    ) -> list[Any]:
        """A call that ranks in the place of these must be told, too."""
        calls = [codec().encode((method, one)) for one in arguments]
        try:
            results = self._ranks.send(method, calls, numbers)
        except NonFiniteError:  # all that was accumulated is forgotten
            self._journal.forget_step()
            raise
        self._journal.add(method, calls, numbers)
        return results

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        return self._ranks.call(method, [arguments] * len(self._ranks.all))

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)
