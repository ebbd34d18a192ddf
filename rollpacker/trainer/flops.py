"""Model FLOPs of training and the peak of the device, for MFU (model FLOPs utilization).

As in PaLM (Chowdhery et al. 2022, arXiv 2204.02311), appendix B: 6 FLOPs per token and parameter
for forward and backward, and 12 x layers x heads x head size per token and token of its row; half
of that here, as attention is causal. A frozen parameter costs 4 instead of 6 (it has no gradient of
its own), so LoRA is 4 and 6 for the adapters. The output layer counts for predicted tokens only,
and of a mixture of experts the share that a token goes through.

Left out: the embedding look-up, norms, biases, softmax, rotary embeddings, the loss, the optimizer,
linear attention's state, and what gradient checkpointing computes again."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rollpacker.trainer.model_shape import decoder_shape
from rollpacker.trainer.quantization import num_elements

PEAK_TFLOPS: dict[tuple[str, ...], float] = {
    ("GB200",): 2500,
    ("B200",): 2250,
    ("GH200",): 989.4,
    ("H200",): 989.4,
    ("H200", "NVL"): 835.5,
    ("H100",): 989.4,
    ("H100", "PCIe"): 756.5,
    ("H100", "NVL"): 835.5,
    ("H800",): 989.4,
    ("H800", "PCIe"): 756.5,
    ("H20",): 148,
    ("A100",): 312,
    ("A800",): 312,
    ("A40",): 149.7,
    ("A30",): 165,
    ("A10",): 125,
    ("A10G",): 70,
    ("L40S",): 362,
    ("L40",): 181,
    ("L20",): 119.5,
    ("L4",): 121,
    ("RTX", "A6000"): 154.8,
    ("RTX", "6000", "Ada"): 364.2,
    ("RTX", "5090"): 209.5,
    ("RTX", "4090"): 165.2,
    ("RTX", "3090"): 71,
}
"""Peak TFLOP/s by words of the device's name: dense bfloat16 on tensor cores with float32 sums.
From NVIDIA's datasheets (halved where one gives the sparse number); GeForce and RTX A6000 from the
white papers of their architectures."""
_OTHER_CHIPS = ("Laptop", "MIG", "D", "Ti")
"""Words in a device's name which say that its chip is another than the one listed in `PEAK_TFLOPS`
under the rest of the name."""
_MEASURE_S = 0.05
_MATMUL_SIZE = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopModel:
    """FLOPs that a token costs in training, forward and backward."""

    body: float
    """FLOPs per token in the layers' matrices."""
    output: float
    """FLOPs per predicted token in the output layer."""
    attention: float
    """FLOPs of attention for each pair of a token and a token that it attends to, in one layer."""
    windows: tuple[int | None, ...]
    """For each layer with attention, how many tokens back it looks. None: to the beginning."""

    @classmethod
    def of(cls, model: nn.Module) -> FlopModel:
        """Return the costs for a transformers causal LM or its body, with or without adapters.
        Parameters that require no gradient at the time of this call count as frozen."""
        known: Any = model
        config = known.config.get_text_config()
        head = getattr(known.get_output_embeddings(), "weight", None)
        embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        active = _active_experts(config)
        body = 0.0
        for name, parameter in model.named_parameters():
            # A tied output layer is an embedding too; it counts as output below.
            if parameter.ndim < 2 or parameter is head or id(parameter) in embeddings:
                continue
            share = active if ".experts." in name else 1.0
            body += share * _per_parameter(parameter) * num_elements(parameter)
        windows = _windows(config)
        return cls(
            body=body,
            output=0.0 if head is None else float(_per_parameter(head) * head.numel()),
            attention=12.0 * decoder_shape(config.to_dict()).query if windows else 0.0,
            windows=windows,
        )

    def training(self, lengths: Sequence[int], num_predicted: int) -> float:
        """Return the FLOPs of forward and backward over rows of these lengths in tokens.
        `num_predicted` tokens of all rows go through the output layer."""
        pairs = sum(_attended(length, window) for length in lengths for window in self.windows)
        return self.body * sum(lengths) + self.output * num_predicted + self.attention * pairs


def peak_flops(device: torch.device) -> float | None:
    """Return the peak FLOP/s of a device: on CUDA the datasheet's number for bfloat16, whatever
    dtype is in use; on a CPU the best of float32 matrix products in a measurement of 50 ms, with
    this thread's number of threads. None: the table has no such GPU."""
    if device.type == "cuda":
        return known_peak_flops(torch.cuda.get_device_name(device))
    if device.type == "cpu":
        return _measured_flops(torch.get_num_threads())
    return None


def known_peak_flops(device_name: str) -> float | None:
    """Return a device's peak FLOP/s by its name. None: the table has no such device."""
    words = set(re.split(r"[\s-]+", device_name))
    if words.intersection(_OTHER_CHIPS):
        return None
    found = [key for key in PEAK_TFLOPS if words.issuperset(key)]
    return PEAK_TFLOPS[max(found, key=len)] * 1e12 if found else None


@functools.cache
def _measured_flops(num_threads: int) -> float:
    """Return a CPU's best FLOP/s in matrix products, measured once per number of threads."""
    left, right = (torch.randn(_MATMUL_SIZE, _MATMUL_SIZE) for _ in range(2))
    result = left @ right
    best = float("inf")
    end = time.perf_counter() + _MEASURE_S
    while (start := time.perf_counter()) < end:
        torch.mm(left, right, out=result)
        best = min(best, time.perf_counter() - start)
    return 2 * _MATMUL_SIZE**3 / best


def _per_parameter(parameter: nn.Parameter) -> int:
    return 6 if parameter.requires_grad else 4


def _active_experts(config: Any) -> float:
    """Return the share of the experts that a token goes through; 1 for a model without experts."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    total = next((n for n in (getattr(config, name, None) for name in names) if n), None)
    chosen = getattr(config, "num_experts_per_tok", None)
    return chosen / total if total and chosen else 1.0


def _windows(config: Any) -> tuple[int | None, ...]:
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    sizes = {"full_attention": None, "sliding_attention": window}
    return tuple(sizes[kind] for kind in kinds if kind in sizes)


def _attended(length: int, window: int | None) -> float:
    """Return the number of (token, attended token) pairs in a row of this length. `window` is how
    many tokens back a token attends; None: to the row's beginning."""
    if window is None or window >= length:
        return length * length / 2
    return window * length - window * window / 2
