"""Memory that two processes of one machine share: how weights get from a trainer to an engine.

A file in memory (/dev/shm where there is one), mapped by both. Its name goes as soon as both have
it, so nothing is left behind, whoever dies.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

ALIGNMENT = 64
_IN_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one tensor lies."""

    start: int
    """Bytes from the beginning."""
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferLayout:
    """What a process must know to map the buffer."""

    path: str
    size_bytes: int
    places: Mapping[str, Place]


class WeightBuffer:
    """`tensors`: by name, views of the shared memory."""

    def __init__(self, layout: BufferLayout) -> None:
        """Map what `create` made."""
        memory = torch.from_file(
            layout.path, shared=True, size=layout.size_bytes, dtype=torch.uint8
        )
        self.layout = layout
        self.tensors: dict[str, Tensor] = {}
        for name, place in layout.places.items():
            num_elements = torch.Size(place.shape).numel()
            end = place.start + num_elements * place.dtype.itemsize
            self.tensors[name] = memory[place.start : end].view(place.dtype).view(place.shape)

    @classmethod
    def create(cls, like: Iterable[tuple[str, Tensor]]) -> WeightBuffer:
        """A buffer for tensors of these names, shapes and dtypes. Raises `OSError`, or `ValueError`
        if there is no room."""
        places, end = {}, 0
        for name, value in like:
            places[name] = Place(start=end, shape=tuple(value.shape), dtype=value.dtype)
            size = value.numel() * value.element_size()
            end += -(-size // ALIGNMENT) * ALIGNMENT
        folder = _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None
        descriptor, path = tempfile.mkstemp(prefix="rollpacker-weights-", dir=folder)
        try:
            os.posix_fallocate(descriptor, 0, max(end, 1))  # says now if there is too little memory
        except BaseException as error:
            os.unlink(path)
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise ValueError(
                    f"{Path(path).parent} has no room for {end / 2**30:.2f} GiB of weights on "
                    "their way from the trainer's processes to the engine: enlarge it (a container:"
                    " --shm-size), or leave train.processes unset"
                ) from error
            raise
        finally:
            os.close(descriptor)
        return cls(BufferLayout(path=path, size_bytes=max(end, 1), places=places))

    def unlink(self) -> None:
        """Take the name away; the memory stays until nobody maps it. Idempotent."""
        Path(self.layout.path).unlink(missing_ok=True)
