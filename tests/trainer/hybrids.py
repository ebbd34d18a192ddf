"""Tiny models whose layers are attention in part only, and their arithmetic in double precision."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tests.trainer.families import SHAPE

DELTA_NET = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": DELTA_NET,
    "qwen3_5_moe_text": DELTA_NET | EXPERTS,
    "qwen3_next": DELTA_NET | EXPERTS,
    "olmo_hybrid": DELTA_NET,
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64},
    "lfm2": {"full_attn_idxs": [1]},
}


_here = threading.local()


def hybrid_model(family: str = "qwen3_5_text", *, seed: int = 0, **settings: Any) -> Any:
    """Two layers in float32, with weights large enough for sharp distributions."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    shape = SHAPE | {"bos_token_id": 1, "eos_token_id": 2} | FAMILIES[family] | settings
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape))
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the default takes no float64
    return model.eval()


def in_double(model: PreTrainedModel) -> PreTrainedModel:
    """Have it compute in float64 throughout, in any thread. Its layers compute states and norms in
    float32 whatever the weights are, and rounding would hide what is to be seen."""
    for module in model.double().modules():
        # A layer's own forward may be a checkpoint, whose inside runs again in the backward pass.
        if not isinstance(module, GradientCheckpointingLayer):
            module.forward = _doubled(module.forward)
    return model


def _doubled(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def inside(*args: Any, **kwargs: Any) -> Any:
        if getattr(_here, "is_double", False):  # modes add up
            return forward(*args, **kwargs)
        _here.is_double = True
        try:
            with _Double():
                return forward(*args, **kwargs)
        finally:
            _here.is_double = False

    return inside


class _Double(TorchFunctionMode):
    """Inside, what asks for float32 gets float64."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args = tuple(map(_wide, args))
        return func(*args, **{name: _wide(value) for name, value in (kwargs or {}).items()})


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
