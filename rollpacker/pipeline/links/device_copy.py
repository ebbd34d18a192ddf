"""Copies between a GPU and host memory, for pipeline links that send tensors by way of host memory.

It is written for CUDA and has run on CPUs only so far, where no copy is made.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A copy of a tensor in host memory. `wait` returns the copy once it is complete."""

    tensor: Tensor
    _copied: torch.cuda.Event | None = None

    @property
    def num_bytes(self) -> int:
        return self.tensor.nbytes

    def wait(self) -> Tensor:
        if self._copied is not None:
            self._copied.synchronize()
        return self.tensor


class HostCopies:
    """Begins copies of tensors from a GPU to host memory, on a CUDA stream of their own. A copy
    waits for the work that was queued before it, and no later work waits for a copy."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def begin(self, tensor: Tensor) -> HostCopy:
        tensor = tensor.detach().contiguous()
        if not tensor.is_cuda:
            return HostCopy(tensor)
        if self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            pinned.copy_(tensor, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._stream)
        tensor.record_stream(self._stream)
        return HostCopy(pinned, copied)


def host_buffer(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return host memory for a tensor that is to be copied to this device: page-locked for CUDA."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device, and return the copy once it is complete there."""
    if device.type == "cpu":
        return tensor
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        moved = tensor.to(device, non_blocking=True)
    stream.synchronize()
    moved.record_stream(torch.cuda.default_stream(device))
    return moved
