"""Weights as they are saved in a model's folder, read tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFolder:
    """The safetensors files of a model's folder."""

    path: str
    dtype: str
    """Name of the dtype that tensors of floating-point numbers are read in."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names, as in the files, and tensors. One tensor is in memory at a time, unless the
        caller keeps it. Raises `OSError` or `SafetensorError` for files that cannot be read."""
        import torch
        from safetensors import safe_open

        dtype: torch.dtype = getattr(torch, self.dtype)
        folder = Path(self.path)
        files = sorted(folder.glob("*.safetensors"))
        if (folder / _INDEX).is_file():
            named = json.loads((folder / _INDEX).read_text("utf-8"))["weight_map"].values()
            files = [folder / name for name in sorted({*named})]
        for file in files:
            with safe_open(file, framework="pt") as saved:
                for name in saved.keys():  # noqa: SIM118  # it is no mapping
                    tensor = saved.get_tensor(name)
                    yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor
