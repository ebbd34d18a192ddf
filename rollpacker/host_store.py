"""Tensors that wait in host memory while the accelerator needs the room for something else.

Whole storages move. A tensor keeps its identity and its views, so optimizers, autograd and FSDP's
`DTensor`s (of which the local shard moves) need not know. Between `offload` and `reload` nobody may
read or write the tensors.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """A `DTensor`'s shard on this process, which shares its memory; any other tensor itself."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class HostStore:
    """Takes storages off devices of type `source`. Tensors elsewhere stay where they are, so on a
    CPU nothing happens."""

    def __init__(self, source: str = "cuda") -> None:
        self.source = source
        self._copies: list[tuple[torch.UntypedStorage, Tensor]] = []

    def offload(self, tensors: Iterable[Tensor]) -> int:
        """Copy their storages to page-locked host memory and free them. Returns the bytes moved."""
        storages = {
            storage.data_ptr(): storage
            for storage in (local(tensor).untyped_storage() for tensor in tensors)
            if storage.device.type == self.source and storage.nbytes() > 0
        }
        copies = [(storage, _host_copy(storage)) for storage in storages.values()]
        if self.source == "cuda" and copies:
            # The copies are asynchronous, and freed memory may be overwritten at once.
            torch.cuda.synchronize()
        for storage, _ in copies:
            storage.resize_(0)
        if self.source == "cuda" and copies:
            # Hand it to other processes on the device too, such as an engine.
            torch.cuda.empty_cache()
        self._copies += copies
        return sum(copy.numel() for _, copy in copies)

    def reload(self) -> None:
        """Bring everything back, bit for bit. The copies run on the current stream."""
        for storage, copy in self._copies:
            storage.resize_(copy.numel())
            _bytes_of(storage).copy_(copy, non_blocking=True)
        self._copies = []

    def forget(self) -> None:
        """Drop the copies; the tensors stay empty."""
        self._copies = []


def _host_copy(storage: torch.UntypedStorage) -> Tensor:
    copy = torch.empty(
        storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda"
    )
    return copy.copy_(_bytes_of(storage), non_blocking=True)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
