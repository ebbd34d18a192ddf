"""Gradient checkpointing for models that stay in eval mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedModel


def enable_checkpointing(model: PreTrainedModel) -> list[nn.Module]:
    """Switch gradient checkpointing on, and return the layers that are checkpointed. Raises
    `ValueError` if the model's class does not support it."""
    if not model.supports_gradient_checkpointing:
        raise ValueError(
            f"{type(model).__name__} does not support gradient checkpointing: "
            "set model.gradient_checkpointing=false"
        )
    settings = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(settings)
    else:  # transformers before it renamed the method
        model.gradient_checkpointing_enable(settings)  # type: ignore[no-untyped-call]  # theirs
    return [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]


@contextmanager
def layers_in_training(layers: Sequence[nn.Module]) -> Iterator[None]:
    """A context that puts these layers into training mode: transformers' layers checkpoint (compute
    their activations again in the backward pass) in that mode alone. Modules inside the layers stay
    in eval mode, so there is no dropout."""
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False
