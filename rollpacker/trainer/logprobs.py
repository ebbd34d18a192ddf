"""Log-probabilities of chosen tokens, at the cost of those tokens only.

The output layer runs on the positions that predict something, never on prompts or padding; and the
softmax is never kept: backward makes it again, block by block, from the logits.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from rollpacker.trainer.batches import MicroBatch

BLOCK_ELEMENTS = 1 << 24
"""Logits that are brought to full precision at a time."""


def response_log_probs(
    model: nn.Module,
    batch: MicroBatch,
    temperature: float,
    model_inputs: Mapping[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [N] of the batch's targets and the entropies [N] of their distributions (no
    gradient).

    Both in float32 (float64 for such a model) under softmax(logits / temperature). No attention
    mask is given: with causal attention nothing real looks at the padding on the right.
    """
    logits = _logits_at(model, batch, model_inputs or {})
    return selected_log_probs(logits, batch.targets, temperature)


def _logits_at(model: nn.Module, batch: MicroBatch, model_inputs: Mapping[str, Any]) -> Tensor:
    """Logits [N, V] at flat positions, by feeding the output layer those hidden states alone.

    What a model does to its logits afterwards (soft caps, scales) stays in place.
    """
    head = model.get_output_embeddings()
    owner = threading.get_ident()

    def keep_positions(_module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Tensor] | None:
        # An engine may be using the same layer in a thread of its own.
        if threading.get_ident() != owner:
            return None
        (hidden,) = arguments
        return (hidden.flatten(0, 1).index_select(0, batch.positions).unsqueeze(0),)

    hook = head.register_forward_pre_hook(keep_positions)
    try:
        logits = model(input_ids=batch.input_ids, use_cache=False, **model_inputs).logits
    finally:
        hook.remove()
    assert logits.shape[:2] == (1, len(batch.positions)), (logits.shape, len(batch.positions))
    return logits[0]


def selected_log_probs(
    logits: Tensor, targets: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature) at `targets`, and the entropy, each [N]; logits [N, V],
    targets [N]."""
    return _SelectedLogProbs.apply(logits, targets, temperature)


class _SelectedLogProbs(Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        chosen, entropies, norms = [], [], []
        for block in _blocks(logits):
            scaled = _full_precision(logits[block]) / temperature
            norm = scaled.logsumexp(-1)
            chosen.append(scaled.gather(-1, targets[block, None]).squeeze(-1) - norm)
            probabilities = (scaled - norm[:, None]).exp_()
            entropies.append(norm - probabilities.mul_(scaled).sum(-1))
            norms.append(norm)
        entropy = torch.cat(entropies)
        ctx.save_for_backward(logits, targets, torch.cat(norms))
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return torch.cat(chosen), entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _grad_entropy: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, norms = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        for block in _blocks(logits):
            scaled = _full_precision(logits[block]) / ctx.temperature
            share = grad[block, None] / ctx.temperature
            result = (scaled - norms[block, None]).exp_().mul_(-share)
            result.scatter_add_(-1, targets[block, None], share)
            grad_logits[block] = result
        return grad_logits, None, None


def _blocks(logits: Tensor) -> list[slice]:
    rows = max(BLOCK_ELEMENTS // logits.shape[1], 1)
    return [slice(first, first + rows) for first in range(0, logits.shape[0], rows)]


def _full_precision(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()
