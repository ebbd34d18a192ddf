"""Moves tensors to host memory while the accelerator needs the room for something else.

Whole storages move. A tensor keeps its identity and its views, so optimizers, autograd and FSDP's
`DTensor`s (of which the local shard moves) need not know. Between `offload` and `reload` the
tensors must not be read or written, except that they may be read inside of `readable`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """Return a `DTensor`'s shard on this process (the same memory), or any other tensor itself."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _itself(tensor: Tensor) -> Tensor:
    """Return the tensor that holds the storage: a `DTensor`'s local shard, not a view of it."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class HostStore:
    """Moves the storages of tensors on devices of type `source` to host memory and back. Other
    tensors stay where they are, so that on a CPU nothing happens."""

    def __init__(self, source: str = "cuda") -> None:
        self.source = source
        self._copies: list[tuple[torch.UntypedStorage, Tensor]] = []
        self._away: dict[int, tuple[Tensor, Tensor]] = {}
        """For each tensor moved to the host, by its `id`: the tensor, the copy of its storage."""
        self.is_readable = False

    def offload(self, tensors: Iterable[Tensor]) -> int:
        """Copy the storages to page-locked host memory and free them. Returns the bytes moved."""
        moving = {
            id(one): one
            for one in map(_itself, tensors)
            if one.device.type == self.source and one.untyped_storage().nbytes() > 0
        }
        storages = {
            one.untyped_storage().data_ptr(): one.untyped_storage() for one in moving.values()
        }
        by_address = {address: _host_copy(storage) for address, storage in storages.items()}
        for key, one in moving.items():
            self._away[key] = (one, by_address[one.untyped_storage().data_ptr()])
        copies = [(storage, by_address[address]) for address, storage in storages.items()]
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
        """Bring all storages back to the device, bit for bit, by copies on the current stream."""
        for storage, copy in self._copies:
            storage.resize_(copy.numel())
            _bytes_of(storage).copy_(copy, non_blocking=True)
        self.forget()

    def forget(self) -> None:
        """Drop the copies in host memory without bringing them back: storages stay empty."""
        self._copies = []
        self._away = {}

    @contextlib.contextmanager
    def readable(self) -> Iterator[None]:
        """Inside the `with`, let the tensors (for `DTensor`s their local shards) refer to their
        copies in host memory, where they can be read. The device is not touched."""
        homes = [(tensor, tensor.data) for tensor, _ in self._away.values()]
        try:
            for tensor, copy in self._away.values():
                there = torch.empty(0, dtype=tensor.dtype)
                tensor.data = there.set_(
                    copy.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
                )
            self.is_readable = True
            yield
        finally:
            self.is_readable = False
            for tensor, home in homes:
                tensor.data = home


def _host_copy(storage: torch.UntypedStorage) -> Tensor:
    copy = torch.empty(
        storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda"
    )
    return copy.copy_(_bytes_of(storage), non_blocking=True)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
