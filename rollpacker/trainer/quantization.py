"""Quantization by bitsandbytes: AdamW with moments of 8 bits, and frozen matrices of 4 bits under
an adapter. Both run on a CPU too, by the same formulas and with other kernels."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rollpacker.imports import require

MIN_8BIT_ELEMENTS = 4096
"""Number of elements from which a parameter's moments have 8 bits. Smaller ones are in float32."""
BLOCK_8BIT, BLOCK_4BIT, BLOCK_OF_SCALES = 256, 64, 256
"""Three block sizes: elements per scale in 8-bit moments, elements per scale in 4-bit matrices, and
scales per scale-of-scales in 4-bit matrices."""
IN_A_LAYER = re.compile(r"\.\d+\.")
"""Matches names of modules inside a layer, since only layers are numbered:
model.layers.3.mlp.up_proj."""
_MOMENTS = ("state1", "state2")
_SCALES = ("absmax1", "absmax2")


def require_bitsandbytes(what: str) -> Any:
    """Import bitsandbytes and return the module. Raises `MissingPackageError`, naming the extra to
    install, if it is missing; `what` is the setting that needs it."""
    require("bitsandbytes", extra="quantized", what=what)
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it tells of optional kernels that are not there
    try:
        import bitsandbytes
    finally:
        logger.setLevel(level)
    return bitsandbytes


# -- moments of 8 bits -----------------------------------------------------------------------


def adamw_8bit(
    groups: list[dict[str, Any]], betas: tuple[float, float], eps: float
) -> torch.optim.Optimizer:
    """Build an AdamW with moments of 8 bits, with one scale per 256 elements (Dettmers et al. 2022,
    "8-bit optimizers via block-wise quantization")."""
    package = require_bitsandbytes("train.optimizer=adamw_8bit")
    optimizer: torch.optim.Optimizer = package.optim.AdamW8bit(
        groups, lr=0.0, betas=betas, eps=eps, min_8bit_size=MIN_8BIT_ELEMENTS
    )
    return optimizer


def moments_like(master: Tensor) -> dict[str, Tensor]:
    """Return tensors with the names, shapes and dtypes of what `moments_of` returns for a
    parameter. Their values are arbitrary."""
    is_coded = master.numel() >= MIN_8BIT_ELEMENTS
    dtype = torch.uint8 if is_coded else torch.float32
    found = {name: torch.empty_like(master.detach(), dtype=dtype) for name in _MOMENTS}
    if is_coded:
        blocks = math.ceil(master.numel() / BLOCK_8BIT)
        found |= {name: torch.empty(blocks, device=master.device) for name in _SCALES}
    return found | {"step": torch.tensor(0.0)}


def moments_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return those tensors of one parameter's 8-bit optimizer state that a checkpoint needs; the
    table of codes is left out. All but `step` are not copied."""
    found = {name: state[name] for name in (*_MOMENTS, *_SCALES) if name in state}
    return found | {"step": torch.tensor(float(state["step"]))}


def restore_moments(
    optimizer: torch.optim.Optimizer, saved: Mapping[nn.Parameter | Tensor, Mapping[str, Tensor]]
) -> None:
    """Load moments that `moments_of` returned, exactly. A parameter that is not in `saved` is left
    without moments, as before its first update."""
    known: Any = optimizer
    known.state.clear()
    for group_index, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if parameter not in saved:
                continue
            known.init_state(group, parameter, group_index, index)
            state = known.state[parameter]
            for name, value in saved[parameter].items():
                if name == "step":
                    state["step"] = int(value)
                else:
                    state[name].copy_(value)


# -- matrices of 4 bits ----------------------------------------------------------------------


def quantize_layers(model: nn.Module, device: torch.device, dtype: torch.dtype) -> int:
    """Quantize the matrices inside the model's layers, in place, to 4-bit NormalFloat with
    quantized scales (Dettmers et al. 2023, "QLoRA"). Embeddings, output layer and norms stay. Each
    matrix goes to `device` as it is quantized; `dtype` is that of the computation. Returns the
    number of quantized matrices."""
    package = require_bitsandbytes("model.quantization=4bit")
    plain = [
        (name, module)
        for name, module in model.named_modules()
        if type(module) is nn.Linear and IN_A_LAYER.search(f"{name}.")
    ]
    for name, module in plain:
        model.set_submodule(name, _quantized(package, module, device, dtype))
    return len(plain)


def _quantized(package: Any, module: nn.Linear, device: torch.device, dtype: torch.dtype) -> Any:
    found = package.nn.Linear4bit(
        module.in_features,
        module.out_features,
        bias=module.bias is not None,
        compute_dtype=dtype,
        quant_type="nf4",
        device="meta",
    )
    # Its kernel for some CPUs repacks the weights at the first call without gradients.
    found.support_avx512bf16_for_cpu = False
    found.weight = package.nn.Params4bit(
        module.weight.data,
        requires_grad=False,
        blocksize=BLOCK_4BIT,
        compress_statistics=True,
        quant_type="nf4",
        module=found,
    )
    if module.bias is not None:
        found.bias = nn.Parameter(module.bias.data, requires_grad=False)
    return found.to(device)


def num_elements(parameter: Tensor) -> int:
    """Return the number of elements of the matrix that a parameter stands for. A 4-bit parameter
    has fewer elements of its own, since it holds codes."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else math.prod(state.shape)


def dequantized(weight: Tensor) -> Tensor:
    """Return the matrix that a 4-bit weight stands for, in the dtype of its computation. Any other
    weight is returned as it is."""
    state = getattr(weight, "quant_state", None)
    if state is None:
        return weight.detach()
    package = require_bitsandbytes("model.quantization=4bit")
    matrix: Tensor = package.functional.dequantize_4bit(weight.detach(), state)
    return matrix
