"""Log-probabilities and entropies of chosen tokens without the logits of a whole micro-batch.

The output layer runs over blocks of positions and vocabulary; the softmax's norm is kept up to date
from block to block, and backward computes each block of logits again. What fits in one block is
kept instead, since a small vocabulary costs more to compute again than to store."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

BLOCK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 24}
"""Number of logits that are computed at a time, by type of device. The number for a CPU is smaller,
so that its caches can hold much of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitTransform:
    """What a model does to the output layer's result to get logits: it multiplies by `scale`, then
    bends the values smoothly to within `softcap`. None: there is no cap."""

    scale: float = 1.0
    softcap: float | None = None

    def apply_(self, logits: Tensor, temperature: float = 1.0) -> Tensor:
        """Transform logits and divide them by the temperature, in place."""
        if self.softcap is None:
            return logits.mul_(self.scale / temperature)
        return logits.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap / temperature)

    def backward_(self, gradient: Tensor, logits: Tensor, temperature: float) -> Tensor:
        """Turn the gradient of `apply_`'s result into that of its input, in place, and return it.
        `logits` is `apply_`'s result."""
        if self.softcap is not None:
            bent = logits * (temperature / self.softcap)
            gradient.mul_(bent.square_().neg_().add_(1))
        return gradient.mul_(self.scale / temperature)


def chunked_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float,
    transform: LogitTransform | None = None,
    block_elements: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [N] of `targets` [N], and entropies [N], under softmax(logits /
    temperature). The logits are `hidden` [N, D] times `weight` [V, D] plus `bias` [V], transformed;
    at most `block_elements` of them (None: `BLOCK_ELEMENTS` of the device) are computed at a time,
    in forward and in backward. Both results are differentiable, in float32 (float64 for float64),
    and so are all sums over blocks."""
    if block_elements is None:
        block_elements = BLOCK_ELEMENTS[hidden.device.type]
    settings = (temperature, transform or LogitTransform(), block_elements)
    found: tuple[Tensor, Tensor] = _ChunkedLogProbs.apply(  # type: ignore[no-untyped-call]  # torch's
        hidden, weight, bias, targets, *settings
    )
    return found


class _ChunkedLogProbs(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        transform: LogitTransform,
        block_elements: int,
    ) -> tuple[Tensor, Tensor]:
        rows, columns = _plan_blocks(len(hidden), len(weight), block_elements)
        output = _OutputLayer(weight, bias, temperature, transform)
        table = None
        if len(rows) == len(columns) == 1:
            logits = output.logits(hidden, columns[0])
            table = logits.log_softmax(-1)
            results = [_whole_softmax(logits, table, targets)]
        else:
            results = [_softmax_in_blocks(hidden[r], output, targets[r], columns) for r in rows]
        chosen, entropy, norms = (torch.cat(parts) for parts in zip(*results, strict=True))
        ctx.save_for_backward(hidden, weight, bias, targets, norms, entropy, table)
        ctx.output_settings, ctx.blocks = (temperature, transform), (rows, columns)
        ctx.set_materialize_grads(False)
        return chosen, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, bias, targets, norms, entropy, table = ctx.saved_tensors
        output = _OutputLayer(weight, bias, *ctx.output_settings)
        sums = _GradientSums(hidden, output, ctx.needs_input_grad)
        rows, columns = ctx.blocks

        def gradient_of_product(block: slice, part: slice) -> Tensor:
            log_probs = table
            if log_probs is None:
                log_probs = output.logits(hidden[block], part).sub_(norms[block, None])
            gradient = _gradient(
                log_probs,
                targets[block] - part.start,
                None if grad is None else grad[block],
                None if grad_entropy is None else grad_entropy[block],
                entropy[block],
            )
            return output.backward(gradient, log_probs, norms[block])

        # Columns outside: a block of the weight's gradient is complete before the next begins, so
        # that only one of them is in full precision.
        for part in columns:
            sums.begin(part)
            for block in rows:
                # Not given a name, so that it is gone before the next block is made.
                sums.add(block, gradient_of_product(block, part))
            sums.end()
        return *sums.results(), None, None, None, None


@dataclass(frozen=True, slots=True)
class _OutputLayer:
    weight: Tensor
    bias: Tensor | None
    temperature: float
    transform: LogitTransform

    def logits(self, hidden: Tensor, columns: slice) -> Tensor:
        """Return logits [rows, columns], transformed and divided by the temperature, in full
        precision. The matrix product is rounded as in the model itself."""
        bias = None if self.bias is None else self.bias[columns]
        logits = F.linear(hidden, self.weight[columns], bias)
        logits = logits.to(full_precision(logits.dtype))
        return self.transform.apply_(logits, self.temperature)

    def backward(self, gradient: Tensor, log_probs: Tensor, norms: Tensor) -> Tensor:
        """Turn the gradient of the logits, in place, into that of the output layer's product.
        `log_probs` plus `norms` (the log of each row's sum of exponentials) are the logits."""
        capped = self.transform.softcap is not None
        logits = log_probs + norms[:, None] if capped else log_probs
        return self.transform.backward_(gradient, logits, self.temperature)


def _whole_softmax(logits: Tensor, table: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute from all logits at once the same as `_RunningSoftmax.results`. `table` [N, V] is the
    log-softmax of `logits`."""
    chosen = table.gather(-1, targets[:, None])
    norms = logits.gather(-1, targets[:, None]) - chosen
    return chosen[:, 0], torch.linalg.vecdot(table.exp(), table).neg_(), norms[:, 0]


def _softmax_in_blocks(
    hidden: Tensor, output: _OutputLayer, targets: Tensor, columns: list[slice]
) -> tuple[Tensor, Tensor, Tensor]:
    softmax = _RunningSoftmax(targets, full_precision(hidden.dtype))
    for part in columns:
        softmax.add(output.logits(hidden, part), part.start)
    return softmax.results()


class _RunningSoftmax:
    """A softmax whose sums over the vocabulary are built up from blocks of logits. The sums are of
    exponentials relative to the largest logit so far."""

    def __init__(self, targets: Tensor, dtype: torch.dtype) -> None:
        self._targets = targets
        # A finite start, so that nothing is infinity times zero.
        self._top = torch.full_like(targets, torch.finfo(dtype).min, dtype=dtype)
        self._sum = torch.zeros_like(self._top)
        self._weighted = torch.zeros_like(self._top)
        """For each row, the sum over the logits so far of exp(logit - top) x (logit - top), where
        top is the row's largest logit so far."""
        self._chosen = torch.zeros_like(self._top)

    def add(self, logits: Tensor, first: int) -> None:
        """Add a block of logits [rows, columns] to the sums; `first` is the block's first column in
        the vocabulary. The block is overwritten."""
        index = self._targets - first
        inside = (index >= 0) & (index < logits.shape[1])
        found = logits.gather(-1, index.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
        self._chosen = torch.where(inside, found, self._chosen)
        top = torch.maximum(self._top, logits.amax(-1))
        shift = self._top - top
        decay = shift.exp()
        logits.sub_(top[:, None])
        exponentials = logits.exp()
        added = exponentials.sum(-1)
        self._weighted = decay * (self._weighted + shift * self._sum)
        self._weighted += exponentials.mul_(logits).sum(-1)
        self._sum = decay * self._sum + added
        self._top = top

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return three tensors by row: the target's log-probability, the entropy, and the log of
        the sum of all exponentials."""
        log_sum = self._sum.log()
        norms = self._top + log_sum
        return self._chosen - norms, log_sum - self._weighted / self._sum, norms


def _gradient(
    log_probs: Tensor,
    index: Tensor,
    grad: Tensor | None,
    grad_entropy: Tensor | None,
    entropy: Tensor,
) -> Tensor:
    """Return the loss's gradient for a block of logits [rows, columns]. `index` is the column of
    each row's target, counted from the block's first; a target may lie outside of the block."""
    result = log_probs.exp()
    if grad_entropy is None:
        assert grad is not None
        result.mul_(-grad[:, None])
    else:
        factor = (log_probs + entropy[:, None]).mul_(-grad_entropy[:, None])
        result.mul_(factor if grad is None else factor.sub_(grad[:, None]))
    if grad is not None:
        inside = (index >= 0) & (index < result.shape[1])
        share = torch.where(inside, grad, 0)[:, None]
        result.scatter_add_(-1, index.clamp(0, result.shape[1] - 1)[:, None], share)
    return result


class _GradientSums:
    """Gradients of hidden states, weight and bias, summed up in full precision from blocks of the
    gradient of the output layer's matrix product."""

    def __init__(self, hidden: Tensor, output: _OutputLayer, needed: tuple[bool, ...]) -> None:
        self._inputs, self._output_weight = hidden, output.weight
        full = full_precision(hidden.dtype)
        self._hidden = torch.zeros_like(hidden, dtype=full) if needed[0] else None
        self._weight = torch.empty_like(output.weight) if needed[1] else None
        self._bias = hidden.new_zeros(len(output.weight), dtype=full) if needed[2] else None

    def begin(self, columns: slice) -> None:
        self._columns = columns
        if self._weight is not None:
            self._part = torch.zeros_like(
                self._weight[columns], dtype=full_precision(self._weight.dtype)
            )

    def add(self, rows: slice, gradient: Tensor) -> None:
        if self._bias is not None:
            self._bias[self._columns] += gradient.sum(0)
        gradient = gradient.to(self._inputs.dtype)
        if self._hidden is not None:
            _add_product(self._hidden[rows], gradient, self._output_weight[self._columns])
        if self._weight is not None:
            _add_product(self._part, gradient.T, self._inputs[rows])

    def end(self) -> None:
        if self._weight is not None:
            self._weight[self._columns] = self._part

    def results(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        dtype = self._inputs.dtype
        hidden = None if self._hidden is None else self._hidden.to(dtype)
        return hidden, self._weight, None if self._bias is None else self._bias.to(dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)


def _plan_blocks(
    num_rows: int, num_columns: int, block_elements: int
) -> tuple[list[slice], list[slice]]:
    """Cut a matrix of logits into blocks of at most `block_elements`, and return the blocks' row
    slices and column slices. Near-square blocks take the fewest passes over hidden states,
    weight and their gradients."""
    assert num_rows > 0 and num_columns > 0, "nothing to predict"
    height = min(num_rows, math.isqrt(block_elements))
    width = min(num_columns, block_elements // height)
    height = min(num_rows, block_elements // width)
    return _cuts(num_rows, height), _cuts(num_columns, width)


def _cuts(length: int, size: int) -> list[slice]:
    return [slice(first, min(first + size, length)) for first in range(0, length, size)]


def full_precision(dtype: torch.dtype) -> torch.dtype:
    """The dtype for sums: float64 for float64, else float32."""
    return dtype if dtype == torch.float64 else torch.float32
