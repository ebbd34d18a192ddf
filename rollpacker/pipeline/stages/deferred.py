"""Weight products of `nn.Linear`, put off: a backward pass (I) gives gradients of inputs, and those
of the weights (W) are computed later, when there is time.

    I   backward through the stage's graph: inputs, norms, biases, embeddings, output layer
    W   weight.grad += output_gradient.T @ input, for each linear layer

The output layer's product is part of I. To put it off, a gradient of [tokens, vocabulary] would
have to be kept or computed again, for the gain of one product a sweep (docs/pipeline.md).

A product is handed to autograd at the weight itself, as its backward pass would have done, so that
hooks run: bfloat16 gradients are summed in float32, and FSDP2 sees its parameters' gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

Products = list[tuple[Tensor, Tensor, Tensor]]
"""For each call of a layer: weight [out, in], input [..., in], gradient of the output [...,
out]."""


class DeferredWeights:
    """Puts off the computation of linear layers' weight gradients, by replacing their `forward`."""

    def __init__(self) -> None:
        self._products: Products | None = None
        self.is_on = True
        """If False, weight gradients are not put off, as if nothing was attached."""

    def attach(self, root: nn.Module) -> None:
        """Put off the weight gradients of all linear layers in `root`. A subclass, such as a
        quantized layer, stays as it is."""
        for module in root.modules():
            if type(module) is nn.Linear:
                module.forward = partial(_forward, module, self)  # type: ignore[method-assign]

    @contextmanager
    def collected(self) -> Iterator[Products]:
        """Yield a list to which backward passes inside the block add what weight gradients need."""
        assert self._products is None
        products: Products = []
        self._products = products
        try:
            yield products
        finally:
            self._products = None

    def keep(self, weight: Tensor, entered: Tensor, gradient: Tensor) -> None:
        assert self._products is not None, "a backward pass outside of `collected`"
        self._products.append((weight, entered, gradient))


@torch.no_grad()
def compute(products: Products) -> None:
    """Give each layer's weight the gradient of its input and output gradient; empty the list."""
    while products:
        weight, entered, gradient = products.pop()
        product = gradient.flatten(0, -2).t() @ entered.flatten(0, -2)
        torch.autograd.backward(weight, product)


def _forward(module: nn.Linear, deferred: DeferredWeights, entered: Tensor) -> Tensor:
    weight = module.weight
    if not (deferred.is_on and torch.is_grad_enabled() and weight.requires_grad):
        return F.linear(entered, weight, module.bias)
    needs_input = entered.requires_grad
    if not needs_input:  # the output must have a gradient all the same
        entered = entered.detach().requires_grad_()
    call = _Call(weight, needs_input, deferred)
    output: Tensor = _Linear.apply(entered, module.bias, call)  # type: ignore[no-untyped-call]  # torch's
    return output


class _Call(NamedTuple):
    """Arguments of a layer's call, hidden from autograd in a tuple: it would otherwise give the
    weight a gradient at once, if only an empty one, and run the weight's hooks."""

    weight: Tensor
    needs_input: bool
    deferred: DeferredWeights


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, entered: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(entered)
        return F.linear(entered, call.weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (entered,) = ctx.saved_tensors
        call: _Call = ctx.call
        call.deferred.keep(call.weight, entered, gradient)
        of_input = gradient @ call.weight if call.needs_input else None
        of_bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return of_input, of_bias, None
