"""Forward and backward passes of a model in pipeline stages, as the rank of one stage runs them.

Every stage is given the same rows and samples, so that all plan the same micro-batches. The first
stage uses their tokens; the last computes the losses, as for a whole model. Several models (policy,
reference, critic) go through together, micro-batch by micro-batch.

A sweep with gradients stays open from one call to the next, and `finish` ends it. Its ops run in a
thread of its own. What ranks must do together (gathering parameters, agreeing, summing) is done
before and after the sweep by the thread that makes the calls, so that all do it in the same order.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from rollpacker.pipeline.plan.work import Load
from rollpacker.pipeline.stages.crossing import Crossing, Passage
from rollpacker.pipeline.stages.cut import Place
from rollpacker.pipeline.stages.deferred import DeferredWeights, Products, compute
from rollpacker.pipeline.stages.executor import Executor, OpenSweep
from rollpacker.pipeline.stages.orders import SweepChooser
from rollpacker.pipeline.stages.staged import StagedPolicy
from rollpacker.trainer.batches import Batcher
from rollpacker.trainer.losses import Losses, no_losses
from rollpacker.trainer.micro_batch import MicroBatch, Row, row_length, row_of
from rollpacker.trainer.model_set import ModelSet
from rollpacker.trainer.passes import (
    Look,
    LossFunction,
    ScoreFunction,
    in_order,
    numbers_of,
    token_scores,
)
from rollpacker.trainer.sharding import Shards, gathered, same_number, sum_in_full_precision
from rollpacker.trainer.step_sums import StepSums
from rollpacker.trainer.trainer import ScoreRequest, TokenScores, TrainSample
from rollpacker.warn_once import WarnOnce

logger = logging.getLogger(__name__)


class StagedPasses:
    """Forward and backward passes (`Passes`) of one stage of each model. `score` returns scores on
    the last stage alone, and an empty list on the others."""

    def __init__(
        self,
        models: ModelSet,
        batcher: Batcher,
        *,
        place: Place,
        crossing: Crossing,
        executor: Executor,
        new_chooser: Callable[[], SweepChooser],
        shards: Shards | None,
    ) -> None:
        assert isinstance(models.policy, StagedPolicy)
        self._models = models
        self._batcher = batcher
        self._place = place
        self._crossing = crossing
        self._executor = executor
        self._new_chooser = new_chooser
        self._shards = shards
        self._open: _Open | None = None
        self._flops = models.policy.flops
        self._warn_once = WarnOnce(logger)
        self._trained = [one for one in (models.policy, models.critic) if one is not None]
        self._deferred = DeferredWeights()
        for module in self._trained:
            self._deferred.attach(module)

    def score(
        self, requests: Sequence[ScoreRequest], scores: ScoreFunction | None = None
    ) -> list[TokenScores]:
        """Run the models without gradients. Returns the scores, in the order of the requests, on
        the last stage, and an empty list on others."""
        rows = [row_of(request) for request in requests]
        plan = self._plan(rows)
        compute = scores or self._models.scores
        scoring = _Scoring(compute, self._crossing, self._place, [b for _, b in plan])
        if self._open is not None:
            self._open.sweep.forward(scoring, len(plan))
        else:
            with self._batcher.attention(), self._gathered():
                self._executor.sweep([load_of(batch) for _, batch in plan], scoring)
        if not self._place.is_last:
            return []
        places = [place for of_batch, _ in plan for place in of_batch]
        return in_order(token_scores(scoring.columns, [batch for _, batch in plan]), places)

    def differentiate(
        self,
        samples: Sequence[TrainSample],
        losses: LossFunction,
        *,
        factor: float,
        gradient_factor: float,
        sums: StepSums,
        look: Look | None = None,
    ) -> bool | None:
        """Begin forward and backward passes over the samples (`Passes`), and return None: `finish`
        waits for them. With `look`, which is called after each micro-batch, wait here and return
        whether all losses were finite. Stages before the last, without losses, return True, and add
        only seconds to `sums`."""
        rows = [row_of(sample) for sample in samples]
        work = [
            _Work(
                batch=batch,
                samples=[samples[place] for place in places],
                losses_of=losses,
                factor=factor,
                gradient_factor=gradient_factor,
            )
            for places, batch in self._plan(rows)
        ]
        if look is not None:
            return self._watched(work, sums, look)
        if self._open is None:
            self._open = self._opened(sums)
        self._open.ops.work += work
        try:
            self._open.sweep.add([load_of(one.batch) for one in work])
        except BaseException:  # they will not run
            del self._open.ops.work[len(self._open.ops.work) - len(work) :]
            raise
        return None

    def rescale(self, factor: float) -> bool:
        """Multiply by `factor` the losses that the open sweep will add to its sums at `finish`.
        Returns whether no sweep is open: only then may the caller multiply gradients himself."""
        for one in () if self._open is None else self._open.ops.work:
            one.factor *= factor
        return self._open is None

    def finish(self) -> bool:
        """Wait for all passes begun by `differentiate`, if any, and add their losses to the sums.
        Returns whether the losses were finite; always True before the last stage."""
        if self._open is None:
            return True
        ended, self._open = self._open, None
        with ended.around:
            ended.sweep.drain()
        ended.sums.seconds += ended.sweep.seconds
        self._warn_of_few(len(ended.ops.work))
        return self._note(ended.ops.work, ended.sums)

    def differentiate_nothing(self) -> None:
        """Give each parameter here a gradient of zeros, by a micro-batch without samples."""
        ops = _Training(self, [_Work(batch=self._batcher.filler(), samples=[])])
        self._deferred.is_on = False
        try:
            with self._batcher.attention(), self._models.for_backward():
                ops.forward(0, None)
                ops.backward(0, None)
        finally:
            self._deferred.is_on = True

    def _gathered(self) -> AbstractContextManager[None]:
        return gathered([*self._trained, *self._models.frozen])

    def _plan(self, rows: Sequence[Row]) -> list[tuple[list[int], MicroBatch]]:
        plan = self._batcher.plan([row_length(row) for row in rows])
        return [(places, self._batcher.batch([rows[place] for place in places])) for places in plan]

    def _opened(self, sums: StepSums) -> _Open:
        """Open a sweep in contexts that last until `finish`: gathered parameters, attention."""
        ops = _Training(self, [])
        with ExitStack() as around:
            around.enter_context(self._batcher.attention())
            around.enter_context(self._models.for_backward())
            around.enter_context(self._gathered())
            sweep = self._executor.open(ops, self._new_chooser())
            return _Open(sweep=sweep, ops=ops, sums=sums, around=around.pop_all())

    def _watched(self, work: Sequence[_Work], sums: StepSums, look: Look) -> bool:
        """Run each micro-batch in a sweep of its own, and call `look` after it with its losses and
        samples; all ranks make equally many sweeps. Returns whether all losses were finite."""
        finite = True
        for number in range(same_number(len(work), self._shards)):
            one = list(work[number : number + 1])
            loads = [load_of(single.batch) for single in one]
            chooser = self._new_chooser()
            chooser.add(loads)
            started = time.perf_counter()
            with self._batcher.attention(), self._models.for_backward(), self._gathered():
                self._executor.sweep(loads, _Training(self, one), chooser)
            sums.seconds += time.perf_counter() - started
            finite = self._note(one, sums) and finite
            found = one[0].found if one else None
            samples = one[0].samples if found is not None else []
            look(_nothing_found() if found is None else found, samples)
        return finite

    def _note(self, work: Sequence[_Work], sums: StepSums) -> bool:
        """On the last stage, add losses to `sums`. Returns whether all found were finite."""
        numbers = []
        for one in work if self._place.is_last else ():
            assert one.found is not None
            flops = self._flops
            numbers.append(
                numbers_of(one.found, one.batch, one.samples, factor=one.factor, flops=flops)
            )
        return sums.add(numbers)

    def _warn_of_few(self, count: int) -> None:
        stages = self._place.count
        if 0 < count < stages and self._place.is_first:
            self._warn_once(
                "%d micro-batch%s for %d pipeline stages: each idles for at least %.0f %% of such "
                "a sweep; lower train.micro_batch_tokens or train.pipeline.stages",
                count,
                "" if count == 1 else "es",
                stages,
                100 * (stages - 1) / (stages - 1 + count),
            )


@dataclass(slots=True, kw_only=True)
class _Work:
    """One micro-batch of a sweep with gradients, and what is kept of it between its ops."""

    batch: MicroBatch
    samples: list[TrainSample]
    losses_of: LossFunction | None = None
    """The function that computes the losses. None for a filler, a micro-batch without samples."""
    factor: float = 1.0
    gradient_factor: float = 0.0
    passage: Passage | None = None
    losses: Sequence[Tensor] = ()
    found: Losses | None = None
    products: Products | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Open:
    """An open sweep, to which micro-batches may be added."""

    sweep: OpenSweep
    ops: _Training
    sums: StepSums
    around: ExitStack
    """Contexts of the sweep, such as gathered parameters; closed when the sweep has ended."""


class _Scoring:
    """One stage's ops without gradients. On the last stage they compute scores."""

    def __init__(
        self,
        scores: ScoreFunction,
        crossing: Crossing,
        place: Place,
        batches: Sequence[MicroBatch],
    ) -> None:
        self._scores, self._crossing, self._place = scores, crossing, place
        self._batches = batches
        self.columns: list[dict[str, Tensor]] = []

    def forward(self, micro_batch: int, arrived: Tensor | None) -> Tensor | None:
        passage = self._crossing.begin(arrived)
        columns = self._scores(self._batches[micro_batch])
        if not self._place.is_last:
            return passage.message()
        self.columns.append(columns)
        return None

    def backward(self, micro_batch: int, arrived: Tensor | None) -> Tensor | None:
        raise AssertionError("a sweep without gradients")

    def weights(self, micro_batch: int) -> None:
        raise AssertionError("a sweep without gradients")


class _Training:
    """One stage's ops in a sweep with gradients. `work`, its micro-batches, may grow meanwhile."""

    def __init__(self, passes: StagedPasses, work: list[_Work]) -> None:
        self.work = work
        self._models, self._crossing = passes._models, passes._crossing
        self._place, self._deferred = passes._place, passes._deferred
        self._trained = passes._trained

    def forward(self, micro_batch: int, arrived: Tensor | None) -> Tensor | None:
        work = self.work[micro_batch]
        work.passage = self._crossing.begin(arrived)
        outputs = self._models.outputs(work.batch)
        if not self._place.is_last:
            return work.passage.message()
        if work.losses_of is None:
            work.losses = no_losses(outputs).losses
        else:
            found = work.losses_of(outputs, work.samples)
            work.losses = [loss * work.gradient_factor for loss in found.losses]
            work.found = found.detached()
        return None

    def backward(self, micro_batch: int, arrived: Tensor | None) -> Tensor | None:
        work = self.work[micro_batch]
        passage = work.passage
        assert passage is not None
        with self._deferred.collected() as products:
            if self._place.is_last:
                for loss in work.losses:
                    loss.backward()  # type: ignore[no-untyped-call]  # torch's
            else:
                passage.backward(arrived)
        # The graph is gone; what W needs is among the products.
        work.passage, work.losses, work.products = None, (), products
        return None if self._place.is_first else passage.gradient_message()

    def weights(self, micro_batch: int) -> None:
        products = self.work[micro_batch].products
        assert products is not None
        compute(products)
        for module in self._trained:
            sum_in_full_precision(module)


def load_of(batch: MicroBatch) -> Load:
    """Return the size of a micro-batch, by which the times of its ops are predicted."""
    return Load.of(batch.lengths, sum(batch.num_targets))


def _nothing_found() -> Losses:
    none = torch.zeros(0)
    return Losses(
        losses=[torch.zeros(())],
        per_token=none,
        entropy=none,
        log_ratio=none,
        update_log_ratio=None,
        sums={},
        value_sums={},
    )
