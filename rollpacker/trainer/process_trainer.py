"""The trainer in processes of its own, the ranks, which train while the engine generates.

Samples are dealt out to the ranks by their work. Every rank adds up the gradients of its own
samples, and `apply` sums them over the ranks. Of several replicas (`train.replicas`) some may be
called alone. Engines have copies of the weights, which are updated through shared memory that rank
0 writes and the engines read.

If a rank is lost, new ranks are started, which load the last checkpoint and repeat the calls made
since (`journal.py`); the memory outlives the ranks. In the same way ranks are replaced between two
steps by ranks in another layout (`relayout`): another number of stages, or other layers and shards
for each rank."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from rollpacker.core.packs import assign
from rollpacker.pipeline.stages.overseer import (
    PREFIX,
    Arrangement,
    Overseer,
    first_arrangement,
)
from rollpacker.pipeline.stages.relayout import Relayout
from rollpacker.trainer.calls import codec
from rollpacker.trainer.journal import Journal, KeptState
from rollpacker.trainer.launch import Ranks
from rollpacker.trainer.outcome import StepOutcome, step_metrics
from rollpacker.trainer.rows import length_of
from rollpacker.trainer.setup import LearnerSetup
from rollpacker.trainer.trainer import (
    HandOver,
    NonFiniteError,
    PipelineConfig,
    RanksLost,
    ScoreRequest,
    TokenScores,
    TrainerError,
    TrainerProcessError,
    TrainSample,
)
from rollpacker.weights.buffer import BufferLayout, WeightSource
from rollpacker.weights.delivery import Delivery, UndeliveredError
from rollpacker.weights.probe import digest_of

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


class ProcessTrainer:
    """A `Trainer` (trainer/trainer.py) whose work is done by ranks, which are processes of their
    own. Calls must not overlap. `ranks` may be connected or only started; `close` ends them.
    `engine_weights` are the names, shapes and dtypes of the weights that engines get. `journal_in`
    is the folder for recorded calls and for states written between checkpoints; None: the system's
    folder for temporary files. `text`: tokens of which engines compare log-probs with the ranks'.
    Constructor and calls raise `TrainerProcessError` if a rank ends."""

    def __init__(
        self,
        setup: LearnerSetup,
        ranks: Ranks,
        engine_weights: Iterable[tuple[str, Tensor]],
        journal_in: Path | None = None,
        text: tuple[int, ...] = (),
    ) -> None:
        self.version = 0
        self._text = text
        self._setup = setup
        self._ranks = ranks
        self._journal = Journal(journal_in)
        self._kept = KeptState(journal_in)
        self._replicas = setup.train.replicas
        self.overseer = _overseer(setup)
        """Watches the speed of pipeline stages and links. None: the model is not in stages."""
        self._arranged: Arrangement | None = None
        """The arrangement that the ranks were told last: how pipeline stages send tensors, and what
        costs they plan with. None: the model is not in stages."""
        self._relayout = Relayout.of(setup, can_switch=ranks.can_start_anew)
        self._switch_s = 0.0
        """Seconds that the last change of layout (split of the model over ranks) took. Before the
        first change, the seconds that the ranks needed to start."""
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")
        try:
            self._layout = BufferLayout.of(engine_weights)
            self._begin(lambda: None)
        except BaseException:
            self.close()
            raise

    async def score(
        self, requests: Sequence[ScoreRequest], replicas: Sequence[int] | None = None
    ) -> list[TokenScores]:
        """Have the ranks of `replicas` (None: of all) share the requests, and return the responses'
        scores (log-probs, values) in the requests' order."""
        shares = self._shares(requests, replicas)

        def score() -> list[TokenScores]:
            self._arrange()
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
        """Deal the samples out to the ranks of `replicas` (None: of all), which add the samples'
        gradients to the step's."""
        ordered = sorted(samples, key=lambda sample: sample.sample)
        shares = self._shares(ordered, replicas)

        def accumulate() -> None:
            self._arrange()
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
        """Multiply the gradients and losses that the ranks have accumulated
        in this step by `factor`."""
        await self._in_thread(lambda: self._change_all("rescale", factor))

    async def update(self) -> Mapping[str, float]:
        """Make an update that is not the step's last, and return its metrics."""

        def update() -> Mapping[str, float]:
            return self._metrics(self._change_all("update"), self.version + 1)

        return await self._in_thread(update)

    async def apply(self) -> Mapping[str, float]:
        """Make the step's last update, and return its metrics. Afterwards ranks in a better layout
        (split of the model) may replace these. Raises `TrainerError` if nothing was accumulated."""

        def apply() -> Mapping[str, float]:
            outcomes = self._change_all("apply")
            self._journal.finish_step()
            self.version += 1
            metrics = self._metrics(outcomes, self.version)
            return metrics | self._relaid([outcome for outcome, _ in outcomes])

        return await self._in_thread(apply)

    @property
    def holders(self) -> tuple[int, ...]:
        """Ids of the processes that send weights; see `Trainer.holders`."""
        return tuple(self.pids[: self._ranks.num_processes // self._replicas])

    async def hand_over(self, delivery: Delivery | None = None) -> HandOver:
        """Have rank 0 write the weights to the shared memory, and return where they can be read; or
        have all ranks send them to engines. See `Trainer.hand_over`."""

        def write() -> HandOver:
            weights: WeightSource | None = None
            host_bytes = 0
            if delivery is None:
                written = self._all("write_weights")
                probe, host_bytes = written[0][0], sum(size for _, size in written)
                weights = WeightSource(version=self.version, layout=self._layout)
            else:
                found = self._all("send_weights", delivery)
                for error in (one for one in found if isinstance(one, str)):
                    raise UndeliveredError(error)
                probe = digest_of(found)
            said = self._all("log_probs_of", self._text)[-1] if self._text else ()
            return HandOver(
                weights=weights,
                probe=probe,
                text=self._text,
                log_probs=said,
                is_delivered=delivery is not None,
                host_bytes=host_bytes,
            )

        return await self._in_thread(write)

    async def offload(self) -> None:
        """Have all ranks move everything from their devices to host memory."""
        await self._in_thread(lambda: self._all("offload"))

    async def reload(self, replicas: Sequence[int] | None = None) -> None:
        """Have the ranks of these replicas (None: all) move what was offloaded back to devices."""
        ranks = self._ranks_of(replicas)
        await self._in_thread(lambda: self._ranks.call("reload", [()] * len(ranks), ranks))

    def save(self, folder: Path) -> None:
        """Have the ranks write a checkpoint to `folder`."""
        self._all("save", folder)
        self._journal.saved(self.version)
        if self._kept.version is not None and not self._journal.reaches(self._kept.version):
            self._kept.drop()

    def load(self, folder: Path) -> None:
        """Have the ranks load a checkpoint. Raises `TrainerError` if it is of another model."""
        self.version = self._all("load", folder)[0]
        self._journal.loaded(self.version)
        self._kept.drop()

    def how_lost(self) -> str | None:
        """Return in words which rank has ended, and how. None: no rank is known to have ended."""
        return self._ranks.how_lost()

    async def restore(self, checkpoint: Path | None, tell: Callable[[], None]) -> None:
        """Start new ranks and bring them to the present `version`, from a checkpoint (None:
        from the run's first model) and recorded calls. `tell` is called now and then to
        show that the work goes on. Raises `TrainerProcessError` if too few calls are
        recorded for this checkpoint."""

        def restore() -> None:
            self._ranks.start_anew()
            self._begin(tell)
            tell()
            version = 0 if checkpoint is None else self._all("load", checkpoint)[0]
            kept = self._kept.version
            if kept is not None and not self._journal.reaches(version):  # calls in other layouts
                version = self._all("load", self._kept.folder(kept))[0]
            for call in self._journal.since(version):
                tell()
                self._ranks.send(call.method, call.calls, call.numbers)
                version += call.method == "apply"
            assert version == self.version, (version, self.version)

        await self._in_thread(restore)

    async def relayout(
        self, pipeline: PipelineConfig, order: Sequence[int] | None = None
    ) -> float | None:
        """Replace the ranks between two steps by new ones in the layout (split of the model over
        ranks) that `pipeline` sets. The new ranks load the state that the old ones wrote. `order`
        gives the index of each new rank's place; that of rank 0 cannot change. Returns the seconds
        that this took. None: the new layout failed, and ranks in the old one are back. Raises
        `ValueError` under torchrun, `TrainerError` or `OSError` if the state cannot be written, and
        `RanksLost` if ranks were lost meanwhile, or if the old layout fails, too."""
        return await self._in_thread(lambda: self._switch(pipeline, order))

    def _switch(self, pipeline: PipelineConfig, order: Sequence[int] | None) -> float | None:
        if not self._ranks.can_start_anew:
            raise ValueError(
                "processes that torchrun has started cannot be started anew in another layout: "
                "start the run as `rollpacker train CONFIG`, or set train.pipeline.layers"
            )
        began = time.perf_counter()
        is_new = self._kept.version != self.version
        if is_new:
            self._all("save", self._kept.new_folder(self.version))
        before, order_before, overseer = self._setup, self._ranks.order, self.overseer
        setup = replace(before, train=replace(before.train, pipeline=pipeline))
        if overseer is None or pipeline.stages != self._stages:
            self.overseer = _overseer(setup)
        else:
            same = order is None or tuple(order) == order_before
            self.overseer = overseer.of_layout(pipeline, same_places=same)
        try:
            self._load_anew(setup, order)
        except Exception as error:
            if _is_over(error):
                raise
            logger.warning("the trainer goes back to the layout that it had: %s", error)
            self.overseer = overseer
            self._go_back(before, order_before)
            return None
        if is_new:  # not before it was read: until then, checkpoint and journal lead here
            self._kept.keep(self.version)
            self._journal.loaded(self.version)
        self._switch_s = time.perf_counter() - began
        return self._switch_s

    def _go_back(self, setup: LearnerSetup, order: Sequence[int]) -> None:
        """End the ranks of a layout that has failed, and start ranks in the layout
        before, as `setup` and `order` (index of each rank's place) describe it. Raises
        `RanksLost` if this fails."""
        try:
            self._load_anew(setup, order)
        except Exception as error:
            if isinstance(error, RanksLost) or _is_over(error):
                raise
            raise self._ranks.lose(f"the trainer's state cannot be taken up: {error}") from error
        finally:
            self._kept.give_up(self.version)

    def _relaid(self, outcomes: Sequence[StepOutcome]) -> dict[str, float]:
        """Change the layout (split of the model over ranks) after a step if another would be
        quicker by the measured times. Returns the change's metrics; empty: no change. Lost ranks
        are not reported here but found by `how_lost`, since the step is done."""
        overseer = self.overseer
        if overseer is None or self._relayout is None:
            return {}
        layout = self._relayout.observe(
            self.version,
            outcomes,
            overseer=overseer,
            places=self._ranks.order,
            switch_s=self._switch_s,
        )
        if layout is None:
            return {}
        pipeline = replace(self._setup.train.pipeline, layers=layout.layers)
        try:
            seconds = self._switch(pipeline, layout.places)
        except (TrainerError, OSError) as error:
            if _is_over(error):
                raise
            logger.warning("the trainer keeps its layout: %s", error)
            return {}
        if seconds is None:
            return {}
        logger.info("the trainer has another layout after %.1f s: %s", seconds, layout)
        return {f"{PREFIX}/relayout_s": seconds}

    def _load_anew(self, setup: LearnerSetup, order: Sequence[int] | None) -> None:
        """Start new ranks with the settings `setup`, at the places of `order` (None: where they
        were), and have them load the state that the old ranks have written."""
        self._setup = setup
        self._ranks.start_anew(order)
        self._begin(lambda: None)
        version = self._all("load", self._kept.folder(self.version))[0]
        assert version == self.version, (version, self.version)

    def _begin(self, tell: Callable[[], None]) -> None:
        """Connect to the started ranks, and have them load the models. `tell` is called in between,
        so that the caller sees progress."""
        began = time.perf_counter()
        if not self._ranks.all:  # else they are
            self._ranks.connect()
        tell()
        for level, line in self._all("setup", self._setup)[0]:
            logger.log(level, "%s", line)
        self._map_weights()
        if self.overseer is not None:
            self._arranged = first_arrangement(self._setup.train.pipeline)
        self._arrange()
        self._switch_s = self._switch_s or time.perf_counter() - began

    def close(self) -> None:
        """End the trainer's thread and its ranks. Idempotent."""
        self._ranks.close()
        self._journal.close()
        self._kept.drop()
        self._executor.shutdown(wait=False)

    @property
    def _stages(self) -> int:
        return self._setup.train.pipeline.stages

    @property
    def pids(self) -> list[int]:
        """The process ids of the ranks, in rank order."""
        return [rank.pid for rank in self._ranks.all]

    def _shares(
        self,
        rows: Sequence[ScoreRequest] | Sequence[TrainSample],
        replicas: Sequence[int] | None,
    ) -> dict[int, list[int]]:
        """Deal `rows` out to the ranks of these replicas (None: of all) by their lengths,
        and return the row indices for each rank. Ranks that differ only in their pipeline
        stage get the same rows."""
        lengths = [length_of(row) for row in rows]
        ranks = self._ranks_of(replicas)
        shares = assign(lengths, len(ranks) // self._stages)
        return dict(zip(ranks, shares * self._stages, strict=True))

    def _ranks_of(self, replicas: Sequence[int] | None) -> list[int]:
        size = self._ranks.num_processes // self._replicas
        numbers = range(self._replicas) if replicas is None else sorted(replicas)
        return [rank for r in numbers for rank in range(r * size, (r + 1) * size)]

    def _metrics(
        self, told: Sequence[tuple[StepOutcome, float | None]], step: int
    ) -> dict[str, float]:
        """Return an update's metrics. `told` has each rank's record of the update
        and the peak FLOP/s of its device (None: not known); `step` is the number of
        the update's step, from 1."""
        outcomes = [outcome for outcome, _ in told]
        metrics = step_metrics(outcomes, told[0][1])
        if self.overseer is not None:
            times = [one.stage_times for one in outcomes if one.stage_times is not None]
            metrics |= self.overseer.observe(step, times)
        return metrics

    def _arrange(self) -> None:
        """Tell the ranks how pipeline stages are to send tensors and plan, if the overseer (which
        watches links and speeds) has changed that. This is done before the next step's work, not in
        `apply`, where a rank lost after the update would count as lost in a finished step."""
        if self.overseer is not None and self._arranged != self.overseer.arrangement:
            self._all("arrange", self.overseer.arrangement)
            self._arranged = self.overseer.arrangement

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
        """Call `method` with `arguments` (one tuple for each called rank) on the ranks with
        these `numbers` (empty: all). The call is recorded, as it changes the ranks' state and
        new ranks must repeat it."""
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


def _overseer(setup: LearnerSetup) -> Overseer | None:
    """Return a new overseer, which watches the links between pipeline stages and their speed. None:
    the model is not in stages."""
    pipeline = setup.train.pipeline
    if pipeline.stages == 1:
        return None
    return Overseer(pipeline, (setup.train.processes or 1) // pipeline.stages)


def _is_over(error: Exception) -> bool:
    """Whether the error says that the run's end closed the trainer during the call."""
    return isinstance(error, TrainerProcessError) and not isinstance(error, RanksLost)
