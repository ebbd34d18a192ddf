"""Shapes of language models and datasheets of GPUs. The numbers are in `hardware.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml  # type: ignore[import-untyped]

from rollpacker.bounds import check_positive

DTYPE_BYTES: dict[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1}
"""Mapping from the name of a number format to the bytes of one number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a dense decoder-only language model on which its time and memory depend."""

    layers: int
    """Number of transformer blocks (layers)."""
    hidden: int
    """Width of the residual stream."""
    kv_heads: int
    """Number of key-value heads of a layer (fewer than query heads in grouped-query attention)."""
    head_dim: int
    """Width of one attention head: how many numbers its key of one token has."""
    params: float
    """Number of parameters of the model, embeddings included."""
    dtype: str = "bfloat16"
    """Number format of the weights and of the KV cache while generating; a key of `DTYPE_BYTES`."""

    def __post_init__(self) -> None:
        check_positive(self, "layers", "hidden", "kv_heads", "head_dim", "params")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, not {self.dtype!r}")

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights of the model, summed over the GPUs that share them."""
        return self.params * DTYPE_BYTES[self.dtype]

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of one token in the KV cache: a key and a value in each head of each layer."""
        return 2 * self.layers * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """Numbers of one GPU, from its datasheet."""

    memory_gb: float
    """Memory of the GPU, in 1e9 bytes."""
    bandwidth_tb_s: float
    """Bandwidth of the GPU's memory, in 1e12 bytes per second."""
    tflops: float
    """Speed in bfloat16 with float32 accumulation and no sparsity, in 1e12 FLOP/s."""
    nvlink_gb_s: float
    """Bandwidth to other GPUs of its node, both directions together, in 1e9 bytes per second."""
    source: str = "datasheet"
    """Where the numbers of this GPU come from."""

    def __post_init__(self) -> None:
        check_positive(self, "memory_gb", "bandwidth_tb_s", "tflops", "nvlink_gb_s")


def read_tables(name: str) -> dict[str, Any]:
    """Returns the contents of a YAML file in this module's folder. `name` is the file's name."""
    text = resources.files(__package__).joinpath(name).read_text("utf-8")
    tables: dict[str, Any] = yaml.safe_load(text)
    return tables


_TABLES = read_tables("hardware.yaml")

MODELS: Mapping[str, ModelShape] = {k: ModelShape(**v) for k, v in _TABLES["models"].items()}
"""Mapping from a model's name to its published shape."""

GPUS: Mapping[str, GpuSpec] = {k: GpuSpec(**v) for k, v in _TABLES["gpus"].items()}
"""Mapping from a GPU's name to the numbers of its datasheet."""
