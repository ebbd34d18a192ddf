"""Room for buckets of weights that processes of one machine share: a file in memory, or memory
of a CUDA device. The process that makes it tells others by numbers and texts how to map it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rollpacker.weights.buffer import Memory

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def shared_slots(count: int, size: int, device: torch.device) -> tuple[Tensor, object, list[Any]]:
    """Make room for `count` buckets of `size` bytes on `device`. Returns it as [count, size] bytes,
    an object that must live as long as others may map it, and what to tell `open_slots` there.
    Raises `OSError`, or `ValueError` if there is not enough memory."""
    import torch

    if device.type == "cuda":
        slots = torch.empty(count, size, dtype=torch.uint8, device=device)
        told = slots.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]  # theirs
        return slots, slots, [one.hex() if isinstance(one, bytes) else one for one in told]
    memory = Memory(count * size)
    return _mapped(memory.path, count, size), memory, [memory.path, memory.inode]


def open_slots(told: Sequence[Any], count: int, size: int) -> Tensor:
    """Map the room that another process has made, as [count, size] bytes. Raises `OSError` or
    `RuntimeError` if it is gone, or on a device that this process does not see."""
    import torch

    if len(told) == 2:
        path, inode = told
        if os.stat(path).st_ino != inode:
            raise FileNotFoundError(f"{path} is another file")
        return _mapped(path, count, size)
    known = [bytes.fromhex(one) if isinstance(one, str) else one for one in told]
    storage: Any = torch.UntypedStorage._new_shared_cuda(*known)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).view(count, size)


def _mapped(path: str, count: int, size: int) -> Tensor:
    import torch

    return torch.from_file(path, shared=True, size=count * size, dtype=torch.uint8).view(
        count, size
    )
