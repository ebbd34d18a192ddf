"""Moves tensors to host memory while the accelerator needs the room for something else.

A store keeps its host memory from one move to the next: page-locked memory takes seconds to make,
and torch's own is rounded up to a power of two and never given back.

Whole storages move. A tensor keeps its identity and its views, so optimizers, autograd and FSDP's
`DTensor`s (of which the local shard moves) need not know. Between `offload` and `reload` the
tensors must not be read or written, except that they may be read inside of `readable`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_ALIGNMENT = 512
"""Each storage's copy begins at a multiple of this number of bytes, so that it suits any dtype."""
_PORTABLE = 1
"""Flag of `cudaHostRegister`: the memory counts as page-locked for all CUDA contexts."""


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
        self._memory: list[Tensor] = []
        """Host memory for copies. The first piece is kept, and grows to the most that was moved at
        once. Others are there if tensors were moved while copies of others were here."""
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
        if self.source == "cuda" and storages:
            # Copies of the last `reload`, on whatever stream, may still read the memory.
            torch.cuda.synchronize()
        room = self._room([storage.nbytes() for storage in storages.values()])
        by_address = {
            address: copy.copy_(_bytes_of(storage), non_blocking=True)
            for (address, storage), copy in zip(storages.items(), room, strict=True)
        }
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
        if self.source == "cuda" and len(self._memory) > 1:
            torch.cuda.synchronize()  # memory that is dropped now must have been read
        self.forget()

    def _room(self, sizes: list[int]) -> list[Tensor]:
        """Return host memory for storages of these sizes in bytes: the memory of the last move if
        that is free and large enough."""
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
        if not self._copies and self._memory and self._memory[0].numel() < starts[-1]:
            self._memory.clear()  # before the larger one is made
        if self._copies or not self._memory:
            self._memory.append(_host_memory(starts[-1], self.source))
        memory = self._memory[-1]
        return [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]

    def forget(self) -> None:
        """Drop the copies in host memory without bringing them back: storages stay empty."""
        self._copies = []
        self._away = {}
        del self._memory[1:]

    @contextlib.contextmanager
    def readable(self) -> Iterator[None]:
        """Inside the `with`, let the tensors (for `DTensor`s their local shards) refer to their
        copies in host memory, where they can be read. The device is not touched."""
        homes = [(tensor, tensor.data) for tensor, _ in self._away.values()]
        try:
            for tensor, copy in self._away.values():
                there = torch.empty(0, dtype=tensor.dtype)
                start = copy.storage_offset() // tensor.itemsize + tensor.storage_offset()
                tensor.data = there.set_(
                    copy.untyped_storage(), start, tensor.shape, tensor.stride()
                )
            self.is_readable = True
            yield
        finally:
            self.is_readable = False
            for tensor, home in homes:
                tensor.data = home


def _host_memory(size: int, source: str) -> Tensor:
    """Return `size` bytes of host memory, page-locked if devices of type `source` copy to such
    memory by themselves. Raises `RuntimeError` if so much cannot be locked."""
    memory = torch.empty(size, dtype=torch.uint8)
    if source == "cuda" and size:
        address, cudart = memory.data_ptr(), torch.cuda.cudart()  # type: ignore[no-untyped-call]  # theirs
        if code := int(cudart.cudaHostRegister(address, size, _PORTABLE)):
            raise RuntimeError(
                f"CUDA cannot lock {size / 2**30:.1f} GiB of host memory (error {code}), in which "
                "weights or optimizer state wait for their turn on the device: is so much memory "
                "free, and allowed to be locked (ulimit -l, or a container's limit)?"
            )
        weakref.finalize(memory, cudart.cudaHostUnregister, address).atexit = False
    return memory


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
