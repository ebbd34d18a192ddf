"""Memory that processes of one machine share, by which engines get weights from a trainer.

    count, version | tensors, each at a multiple of 64 bytes | count, version

One process writes, any number of others read. `count` is how often writing began. The two numbers
before the tensors are changed before the tensors are, the two behind them afterwards. A reader
compares both pairs before it copies, and the first pair again after it: weights that were written
in part, or changed meanwhile, are refused. The newest version stays until the next one comes, for
an engine that joins late.

The memory has no name in any folder, and no limit but the machine's: others map it through the
descriptor of the process that made it. It is freed when the last process that maps it ends, so that
nothing is left behind. Importing this is quick: torch is imported with the first buffer.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ALIGNMENT = 64
"""Tensors begin at multiples of 64 bytes; the numbers at either end occupy 64 bytes each."""


class StaleWeightsError(RuntimeError):
    """Raised if a buffer does not have the wanted version; the message tells what it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one tensor is in a buffer, with its shape and dtype."""

    start: int
    """Number of bytes of the buffer before the tensor."""
    shape: tuple[int, ...]
    dtype: str
    """Name of the tensor's dtype in torch, such as float32 or bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferLayout:
    """What a process needs to map a buffer of weights: file, size, and where each tensor is."""

    path: str
    inode: int
    """Inode of the file at `path`, since a later file may have the same path."""
    size_bytes: int
    places: Mapping[str, Place]
    host: str = ""
    """Name of the host on which `path` leads to the buffer. Empty for the run's own host."""

    @classmethod
    def of(cls, like: Iterable[tuple[str, Tensor]]) -> BufferLayout:
        """Return the layout of a buffer for tensors of these names, shapes and dtypes. Its `path`
        is empty: the memory is made later (`Host.hold` in workers/host.py)."""
        places, end = {}, ALIGNMENT
        for name, value in like:
            dtype = str(value.dtype).removeprefix("torch.")
            places[name] = Place(start=end, shape=tuple(value.shape), dtype=dtype)
            size = value.numel() * value.element_size()
            end += -(-size // ALIGNMENT) * ALIGNMENT
        return cls(path="", inode=0, size_bytes=end + ALIGNMENT, places=places)

    def memory(self) -> Memory:
        """Make memory for a buffer of this layout, which other processes of this machine can map.
        Raises `OSError`, or `ValueError` if there is not enough memory."""
        return Memory(self.size_bytes)

    def at(self, memory: Memory) -> BufferLayout:
        """Return this layout for another memory: with its path and inode."""
        return replace(self, path=memory.path, inode=memory.inode)

    def source(self, version: int) -> WeightSource:
        """Return the version of this number in this buffer, for engines to read."""
        return WeightSource(version=version, layout=self)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSource:
    """One version of the weights, and the buffer from which processes of its host can read it."""

    version: int
    layout: BufferLayout


class WeightBuffer:
    """A buffer of weights that this process maps. `tensors` has views of the memory by name."""

    def __init__(self, layout: BufferLayout) -> None:
        """Map the memory of `layout`. Raises `StaleWeightsError` if it is gone."""
        import torch

        try:
            found = os.stat(layout.path)
            if (found.st_ino, found.st_size) != (layout.inode, layout.size_bytes):
                raise FileNotFoundError(f"{layout.path} is another file")
            memory = torch.from_file(
                layout.path, shared=True, size=layout.size_bytes, dtype=torch.uint8
            )
        except (OSError, RuntimeError) as error:
            raise StaleWeightsError(f"the trainer's shared weights are gone: {error}") from error
        self.layout = layout
        self._memory: Memory | None = None
        """The buffer's memory if this object has made it; None if another process has."""
        self.tensors: dict[str, Tensor] = {}
        for name, place in layout.places.items():
            dtype: torch.dtype = getattr(torch, place.dtype)
            end = place.start + torch.Size(place.shape).numel() * dtype.itemsize
            self.tensors[name] = memory[place.start : end].view(dtype).view(place.shape)
        self._before = memory[:16].view(torch.int64)
        """Two numbers before the tensors: how often writing began, and the newest version."""
        self._behind = memory[-ALIGNMENT:][:16].view(torch.int64)

    @classmethod
    def create(cls, like: Iterable[tuple[str, Tensor]]) -> WeightBuffer:
        """Return a buffer for tensors of these names, shapes and dtypes, which others can map as
        long as it lives. Raises `OSError`, or `ValueError` if there is not enough memory."""
        layout = BufferLayout.of(like)
        memory = layout.memory()
        buffer = cls(layout.at(memory))
        buffer._memory = memory
        return buffer

    @contextmanager
    def writing(self, version: int) -> Iterator[Mapping[str, Tensor]]:
        """Yield the tensors, for the body of the `with` to write this version into them. Readers
        get errors until the body has ended without an error."""
        count = int(self._before[0]) + 1
        self._before[0], self._before[1] = count, version
        yield self.tensors
        self._behind[0], self._behind[1] = count, version

    @contextmanager
    def reading(self, version: int) -> Iterator[Mapping[str, Tensor]]:
        """Yield the tensors, for the body of the `with` to copy. Raises `StaleWeightsError` if they
        are incomplete or not of this version, and at the end if they changed meanwhile."""
        before, behind = self._before.tolist(), self._behind.tolist()
        if not before[0]:
            raise StaleWeightsError("no weights have been written yet")
        if before != behind:
            raise StaleWeightsError(f"the weights of version {before[1]} are written only in part")
        if before[1] != version:
            raise StaleWeightsError(f"the weights are of version {before[1]}, not {version}")
        yield self.tensors
        if self._before.tolist() != before:
            raise StaleWeightsError(f"the weights of version {version} changed while being read")


class WeightReader:
    """Reads versions of the weights. It maps a buffer once for all the versions written in it."""

    def __init__(self) -> None:
        self._buffer: WeightBuffer | None = None

    def reading(self, source: WeightSource) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Yield the tensors of this version to be copied inside the `with`
        (`WeightBuffer.reading`)."""
        if self._buffer is None or self._buffer.layout != source.layout:
            self._buffer = WeightBuffer(source.layout)
        return self._buffer.reading(source.version)


def read(layout: BufferLayout, start: int, size: int) -> bytes:
    """Return `size` bytes from byte `start` of a buffer here. Raises `OSError` if it is gone."""
    with opened(layout) as file:
        return os.pread(file.fileno(), size, start)


def opened(layout: BufferLayout, flags: int = os.O_RDONLY) -> IO[bytes]:
    """Open the memory of a buffer on this machine as a file. Raises `OSError` if it is gone."""
    descriptor = os.open(layout.path, flags)
    if os.fstat(descriptor).st_ino != layout.inode:
        os.close(descriptor)
        raise FileNotFoundError(f"{layout.path} is another file")
    return os.fdopen(descriptor, "rb", buffering=0)


class Memory:
    """Memory without a name, which processes of this machine can map while this object lives."""

    def __init__(self, size_bytes: int) -> None:
        """Reserve the memory. Raises `OSError`, or `ValueError` if too little is left."""
        self.descriptor, self.path = _reserved(size_bytes)
        self.inode = os.fstat(self.descriptor).st_ino
        self.close = weakref.finalize(self, _give_up, self.descriptor, self.path)
        """Function that frees the memory. Processes that have mapped it can use it further."""


def _reserved(size: int) -> tuple[int, str]:
    """Reserve this many bytes of new memory. Returns its descriptor, and the path by which other
    processes open it. Raises `OSError`, or `ValueError` if there is not enough memory."""
    available = _available_bytes()
    no_room = ValueError(
        f"{available / 2**30:.2f} GiB of memory are left, and weights on their way from the trainer"
        f" to the engines need {size / 2**30:.2f} GiB: take a smaller model, fewer processes "
        "(rollout.engines, train.processes), or a machine with more memory"
    )
    if size > available:
        raise no_room
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("rollpacker-weights")
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
    else:  # not Linux
        descriptor, path = tempfile.mkstemp(prefix="rollpacker-weights-")
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)  # says now if there is too little
        else:
            os.ftruncate(descriptor, size)
    except BaseException as error:
        _give_up(descriptor, path)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.ENOMEM):
            raise no_room from error
        raise
    return descriptor, path


def _available_bytes() -> float:
    """Return the kernel's estimate of the bytes available without swapping; infinity if unknown."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return math.inf


def _give_up(descriptor: int, path: str) -> None:
    os.close(descriptor)
    if not path.startswith("/proc/"):
        Path(path).unlink(missing_ok=True)
