"""The weights of an engine's own module, which an update overwrites."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from rollpacker.rollout.engine import EngineError


def own_weights(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """What training changes: of a model with adapters, those alone."""
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


@torch.no_grad()
def copy_weights(
    own: Mapping[str, torch.nn.Parameter], weights: Mapping[str, torch.Tensor]
) -> None:
    """Raises `EngineError` if they are another model's."""
    if strange := sorted(own.keys() ^ weights.keys()):
        raise EngineError(f"these are the weights of another model: {strange[0]} differs")
    for name, value in weights.items():
        if own[name].shape != value.shape:
            raise EngineError(
                f"these are the weights of another model: {name} is {list(value.shape)}, "
                f"not {list(own[name].shape)}"
            )
        own[name].copy_(value)
