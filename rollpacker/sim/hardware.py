"""What models and GPUs are made of: public shapes and datasheet numbers, nothing measured."""

from __future__ import annotations

import math
from dataclasses import dataclass

DTYPE_BYTES: dict[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1}
"""Bytes of one number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A dense decoder, as far as time and memory depend on it."""

    layers: int
    hidden: int
    """Width of the residual stream."""
    kv_heads: int
    """Key-value heads of a layer (grouped-query attention has fewer than query heads)."""
    head_dim: int
    params: float
    """Parameters, embeddings included."""
    dtype: str = "bfloat16"
    """Of the weights and of the KV cache while generating; a key of `DTYPE_BYTES`."""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "kv_heads", "head_dim", "params"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} of a model must be more than 0, not {value}")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, not {self.dtype!r}")

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights, over all GPUs that share them."""
        return self.params * DTYPE_BYTES[self.dtype]

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of one token in the KV cache: a key and a value per layer and head."""
        return 2 * self.layers * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]


MODELS: dict[str, ModelShape] = {
    "qwen2.5-0.5b": ModelShape(layers=24, hidden=896, kv_heads=2, head_dim=64, params=494_032_768),
    "qwen2.5-1.5b": ModelShape(
        layers=28, hidden=1536, kv_heads=2, head_dim=128, params=1_543_714_304
    ),
    "qwen2.5-3b": ModelShape(
        layers=36, hidden=2048, kv_heads=2, head_dim=128, params=3_085_938_688
    ),
    "qwen2.5-7b": ModelShape(
        layers=28, hidden=3584, kv_heads=4, head_dim=128, params=7_615_616_512
    ),
    "qwen2.5-14b": ModelShape(
        layers=48, hidden=5120, kv_heads=8, head_dim=128, params=14_770_033_664
    ),
    "qwen2.5-32b": ModelShape(
        layers=64, hidden=5120, kv_heads=8, head_dim=128, params=32_763_876_352
    ),
    "qwen2.5-72b": ModelShape(
        layers=80, hidden=8192, kv_heads=8, head_dim=128, params=72_706_203_648
    ),
    "qwen3-8b": ModelShape(layers=36, hidden=4096, kv_heads=8, head_dim=128, params=8_190_735_360),
}
"""Published shapes, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """One GPU by its datasheet."""

    memory_gb: float
    """1e9 bytes."""
    bandwidth_tb_s: float
    """Of its memory, 1e12 bytes per second."""
    tflops: float
    """bfloat16 with float32 accumulation, dense (no structured sparsity), 1e12 per second."""
    nvlink_gb_s: float
    """To the other GPUs of its node, both directions together, 1e9 bytes per second."""
    source: str = "datasheet"
    """Of all the numbers above."""

    def __post_init__(self) -> None:
        for name in ("memory_gb", "bandwidth_tb_s", "tflops", "nvlink_gb_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} of a GPU must be more than 0, not {value}")


GPUS: dict[str, GpuSpec] = {
    "a100": GpuSpec(
        memory_gb=80, bandwidth_tb_s=2.039, tflops=312, nvlink_gb_s=600, source="datasheet, SXM4"
    ),
    "h100": GpuSpec(
        memory_gb=80, bandwidth_tb_s=3.35, tflops=989, nvlink_gb_s=900, source="datasheet, SXM5"
    ),
    "h200": GpuSpec(
        memory_gb=141, bandwidth_tb_s=4.8, tflops=989, nvlink_gb_s=900, source="datasheet, SXM5"
    ),
    "h800": GpuSpec(
        memory_gb=80, bandwidth_tb_s=3.35, tflops=989, nvlink_gb_s=400, source="datasheet, SXM5"
    ),
    "h20": GpuSpec(
        memory_gb=96, bandwidth_tb_s=4.0, tflops=148, nvlink_gb_s=900, source="datasheet, SXM5"
    ),
}
"""By name. Where a datasheet prints tensor-core rates with sparsity only, this is half of them."""
