"""Sweeps (forward and backward passes) of the models over micro-batches: rows and losses in, sums
and gradients out.

A learner chooses samples and losses; how samples are cut into micro-batches, and in which order
these run on which device, is known here alone. `LocalPasses` runs whole models, or with FSDP2 a
rank's shards of them: then every pass is a collective, and a rank with fewer micro-batches also
runs fillers (the smallest ones, of weight 0). `pipeline.stages.passes` has the `Passes` of a model
in pipeline stages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from rollpacker.trainer.batches import Batcher
from rollpacker.trainer.flops import FlopModel
from rollpacker.trainer.losses import Losses, Outputs, no_losses
from rollpacker.trainer.micro_batch import MicroBatch, Row, row_length, row_of
from rollpacker.trainer.model_set import ModelSet
from rollpacker.trainer.sharding import Shards, same_number
from rollpacker.trainer.step_sums import MicroBatchNumbers, StepSums
from rollpacker.trainer.trainer import ScoreRequest, TokenScores, TrainSample

LossFunction = Callable[[Outputs, Sequence[TrainSample]], Losses]
ScoreFunction = Callable[[MicroBatch], dict[str, Tensor]]
Look = Callable[[Losses, Sequence[TrainSample]], None]
"""A check that is called after each backward pass with the micro-batch's losses and samples (empty
for a filler of weight 0). If it raises, it does so on all ranks."""


class Passes(Protocol):
    """Runs the models over samples, for scores or for gradients. Several ranks must
    make every call together."""

    def score(
        self, requests: Sequence[ScoreRequest], scores: ScoreFunction | None = None
    ) -> list[TokenScores]:
        """Run the models on the requested responses without gradients. `scores` computes a
        micro-batch's columns; None: `ModelSet.scores`. Returns the scores in the requests' order;
        empty in all pipeline stages but the last."""
        ...

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
        """Run forward and backward over the samples. Every parameter's gradient grows by that of
        the losses times `gradient_factor`, and `sums` by the losses times `factor`. Without `look`
        (a check after each micro-batch) some passes may still be running on return; `finish` waits
        for them. Returns whether every loss was finite on this rank; None: only `finish` can say. A
        backward pass runs even from a loss that is not finite, since other ranks or stages wait in
        it, so the gradient is then unusable."""
        ...

    def rescale(self, factor: float) -> bool:
        """Multiply by `factor` the losses that running passes have yet to add to the `sums` given
        to `differentiate`. Returns whether no pass is running: gradients may then be multiplied
        now."""
        ...

    def finish(self) -> bool:
        """Wait until no pass is running. Returns whether all losses on this rank were finite in
        those calls of `differentiate` that returned None, as they could not tell yet."""
        ...

    def differentiate_nothing(self) -> None:
        """Run forward and backward of the smallest possible micro-batch, with losses of weight
        zero, so that gradients are summed over ranks."""
        ...


class LocalPasses:
    """Runs whole models, or a rank's shards of them, as `Passes` without pipeline stages."""

    def __init__(
        self, models: ModelSet, batcher: Batcher, *, device: torch.device, shards: Shards | None
    ) -> None:
        self._models = models
        self._batcher = batcher
        self._flops = FlopModel.of(models.policy.model)
        self._device = device
        self._shards = shards

    def score(
        self, requests: Sequence[ScoreRequest], scores: ScoreFunction | None = None
    ) -> list[TokenScores]:
        """Run the models on the requested responses without gradients. Returns scores in order."""
        compute = scores or self._models.scores
        rows = [row_of(request) for request in requests]
        order: list[int] = []
        columns, batches = list[Mapping[str, Tensor]](), list[MicroBatch]()
        with self._batcher.attention():
            for places, batch in self._micro_batches(rows):
                found = compute(batch)
                if places:  # else it is a filler
                    order += places
                    columns.append(found)
                    batches.append(batch)
        return in_order(token_scores(columns, batches), order)

    def differentiate(
        self,
        samples: Sequence[TrainSample],
        losses: LossFunction,
        *,
        factor: float,
        gradient_factor: float,
        sums: StepSums,
        look: Look | None = None,
    ) -> bool:
        """Run forward and backward over the samples, and return whether all losses were finite. The
        parameters are as in `Passes.differentiate`."""
        rows = [row_of(sample) for sample in samples]
        done: list[tuple[Losses, MicroBatch, list[TrainSample]]] = []
        started = time.perf_counter()
        seconds: float | None = None
        with self._batcher.attention(), self._models.for_backward():
            for places, batch in self._micro_batches(rows):
                part = [samples[place] for place in places]
                if not part and seconds is None:  # fillers, which come last, do not count
                    seconds = self._seconds_since(started)
                outputs = self._models.outputs(batch)
                found = losses(outputs, part) if part else no_losses(outputs)
                for loss in found.losses:
                    _backward(loss * gradient_factor)
                found = found.detached()
                done.append((found, batch, part))
                if look is not None:
                    look(found, part)
        sums.seconds += self._seconds_since(started) if seconds is None else seconds
        # Numbers are read at the end: a read waits for the GPU, which would then wait for the next
        # micro-batch to be prepared.
        return sums.add([numbers_of(*one, factor=factor, flops=self._flops) for one in done])

    def rescale(self, factor: float) -> bool:
        """Return True, since no pass is running: each call of `differentiate` waits for its passes,
        so all losses are in its `sums` already."""
        return True

    def finish(self) -> bool:
        """Return True: no pass runs between two calls, so there is nothing to wait for."""
        return True

    def differentiate_nothing(self) -> None:
        """Run forward and backward of the smallest possible micro-batch, with loss weight 0."""
        batch = self._batcher.filler()
        with self._batcher.attention(), self._models.for_backward():
            for loss in no_losses(self._models.outputs(batch)).losses:
                _backward(loss)

    def _micro_batches(self, rows: Sequence[Row]) -> Iterator[tuple[list[int], MicroBatch]]:
        """Yield each micro-batch with the indices of its rows. Fillers (micro-batches of weight 0),
        with no indices, follow if another rank has more micro-batches."""
        plan = self._batcher.plan([row_length(row) for row in rows])
        num_fillers = same_number(len(plan), self._shards) - len(plan)
        for places in plan:
            yield places, self._batcher.batch([rows[place] for place in places])
        for _ in range(num_fillers):
            yield [], self._batcher.filler()

    def _seconds_since(self, started: float) -> float:
        """Seconds since `started` (of `time.perf_counter`), once the GPU has done its work."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - started


def token_scores(
    columns: Sequence[Mapping[str, Tensor]], batches: Sequence[MicroBatch]
) -> list[TokenScores]:
    """Return the scores of all rows of some micro-batches, row after row. `columns` are for each
    micro-batch tensors of one number per target, by the names of `TokenScores`' fields. They are
    read from the device in one transfer."""
    if not columns or not columns[0]:
        return [TokenScores() for batch in batches for _ in batch.num_targets]
    counts = [count for batch in batches for count in batch.num_targets]
    lines = [torch.cat([of[name].double() for of in columns]) for name in columns[0]]
    rows = torch.split(torch.stack(lines).cpu(), counts, dim=1)
    return [TokenScores(**dict(zip(columns[0], map(tuple, r.tolist()), strict=True))) for r in rows]


def in_order(scores: Sequence[TokenScores], places: Sequence[int]) -> list[TokenScores]:
    """Return the scores sorted by their places, which are the numbers from 0."""
    return [score for _, score in sorted(zip(places, scores, strict=True), key=lambda one: one[0])]


def numbers_of(
    found: Losses,
    batch: MicroBatch,
    samples: Sequence[TrainSample],
    *,
    factor: float,
    flops: FlopModel,
) -> MicroBatchNumbers:
    """Return one micro-batch's token counts, FLOPs and losses, for `StepSums.add`. `factor` is that
    of the losses, which corrects provisional sample weights. A filler has no samples."""
    lengths = [len(s.prompt_tokens) + len(s.response_tokens) - 1 for s in samples]
    return MicroBatchNumbers(
        batch=batch,
        loss=found.losses[0],
        entropy=found.entropy,
        log_ratio=found.log_ratio,
        update_log_ratio=found.update_log_ratio,
        token_sums=found.sums,
        value_loss=found.losses[1] if len(found.losses) > 1 else None,
        value_token_sums=found.value_sums,
        factor=factor,
        sample_weights=[sample.loss_weight for sample in samples],
        flops=flops.training(lengths, len(batch.targets)),
        is_filler=not samples,
    )


def _backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
