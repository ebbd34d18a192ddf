"""torch.compile for a model's layers, with the uncompiled ones to fall back on.

Layers, not the whole model: they are alike, so one compilation serves all of them, and what is
between them (packing, FSDP's hooks, LoRA's switch) stays plain Python."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import Cache, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rollpacker.trainer.packing import layers_with_state

log = logging.getLogger(__name__)

_FORWARD_CHECKPOINTS = "__call__" not in vars(GradientCheckpointingLayer)
"""Whether transformers' layers checkpoint inside `forward`. Earlier versions of transformers
checkpoint in `__call__`, around any `forward`."""

Backend = str | Callable[..., Any]


def compile_layers(model: nn.Module, *, backend: Backend = "inductor") -> bool:
    """Run the model's layers through torch.compile, in place. Returns whether there is a layer to
    compile; if not, a warning says so. The layers are compiled when they first run. If compiling
    fails, then or later, all layers run uncompiled from there on, and one warning says why. A model
    whose layers keep a state (such as linear attention) is left as it is, with a warning. Lengths
    may vary from call to call (`dynamic=True`). Calls with a key-value cache or in inference mode
    (generation) stay uncompiled. Works with FSDP2, before or after sharding, and with gradient
    checkpointing. Parameter names and state stay as they are."""
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    transformer = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    state = None if transformer is None else layers_with_state(transformer)
    if state is not None:
        # Their loop over a row's chunks is another program for each length, and its backward pass
        # fails at some.
        log.warning(
            "train.compile: %s has %s, it runs uncompiled", type(transformer).__name__, state
        )
        return False
    if not layers:
        log.warning(
            "train.compile: %s has no layers of transformers' kind, it runs uncompiled",
            type(model).__name__,
        )
        return False
    attempt = _Attempt(backend)
    for layer in layers:
        layer.forward = _CompiledForward(layer, attempt)
    return True


class _Attempt:
    """State that a model's compiled layers share: the backend, and whether compiling failed, after
    which all layers run uncompiled."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.failed = False

    def give_up(self, error: Exception) -> None:
        if not self.failed:
            log.warning(
                "train.compile failed, the run goes on with uncompiled layers: %s: %s",
                type(error).__name__,
                _first_lines(error),
            )
        self.failed = True


class _CompiledForward:
    """Stands in for a layer's `forward`: runs compiled code, or the layer's own `forward`
    after compiling has failed."""

    def __init__(self, layer: nn.Module, attempt: _Attempt) -> None:
        self._layer = layer
        self._attempt = attempt
        self._compiled: Callable[..., Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave compiled code out of copies, since it would use the weights of the original."""
        return {"_layer": self._layer, "_attempt": self._attempt, "_compiled": None}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Not earlier than now: sharding changes a layer's class.
        eager = type(self._layer).forward.__get__(self._layer)
        # A layer writes into its cache: the trial run would write twice, and each layer's entry
        # would be a reason to compile again.
        # So would be what the engine of a model that is trained in place hands to its attention.
        generates = torch.is_inference_mode_enabled() or any(
            isinstance(v, Cache) for v in (*args, *kwargs.values())
        )
        if self._attempt.failed or generates:
            return eager(*args, **kwargs)
        try:
            if self._compiled is None:
                self._compile(eager, args, kwargs)
            if _FORWARD_CHECKPOINTS and self._layer.gradient_checkpointing and self._layer.training:
                checkpoint: Any = self._layer._gradient_checkpointing_func
                return checkpoint(partial(self._run, **kwargs), *args)
            return self._run(*args, **kwargs)
        except (_CompilingFailed, TorchDynamoException) as error:
            cause = error.__cause__ if isinstance(error, _CompilingFailed) else error
            assert isinstance(cause, Exception)
            self._attempt.give_up(cause)
            return eager(*args, **kwargs)

    def _compile(
        self, eager: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Compile the layer, and try the code forward and backward on copies of these arguments:
        some compilers run in the backward pass only, when it would be too late to fall back."""
        try:
            self._compiled = torch.compile(eager, dynamic=True, backend=self._attempt.backend)
            args, kwargs = tree_map_only(Tensor, _fresh_leaf, (args, dict(kwargs)))
            inputs = [*tree_leaves((args, kwargs)), *self._layer.parameters()]
            # Hooks of an enclosing checkpoint would count what is saved here.
            with torch.enable_grad(), saved_tensors_hooks(_same, _same):
                outputs = [t for t in tree_leaves(self._run(*args, **kwargs)) if _needs_grad(t)]
                if outputs:
                    # Not `backward`, which would add to the weights' gradients.
                    torch.autograd.grad(
                        sum(t.sum() for t in outputs),
                        [t for t in inputs if _needs_grad(t)],
                        allow_unused=True,
                    )
        except Exception as error:
            raise _CompilingFailed from error

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled code. The layer's training flag, which serves checkpointing alone, is
        cleared meanwhile: checkpointing inside would hide the layer's code from the compiler."""
        assert self._compiled is not None
        before, self._layer.training = self._layer.training, False
        try:
            return self._compiled(*args, **kwargs)
        finally:
            self._layer.training = before


class _CompilingFailed(Exception):
    """Compiling a layer failed. The exception's cause says why."""


def _needs_grad(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _fresh_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _first_lines(error: Exception, number: int = 3) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:number])
