"""The trainer's weights on a host that is not the run's: copies, or the memory that a trainer there
writes.

A copy is a buffer of the same bytes (`weight_buffer.py`), so whoever maps it knows by the same
numbers whether it is whole. Its first bytes are written first and its last bytes last.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import IO

from rollpacker.weights.buffer import BufferLayout, Memory


class Copies:
    """Of each buffer one, however many versions come through it."""

    def __init__(self) -> None:
        self._by_source: dict[tuple[str, str, int], Memory] = {}

    def layout(self, source: BufferLayout) -> BufferLayout:
        """Where the copy of this buffer is; it is made when first asked for. Of one that is still
        to be had (`BufferLayout.of`) it is the memory that the trainer writes. Raises `ValueError`
        if there is no room."""
        key = source.host, source.path, source.inode
        if key not in self._by_source:
            self._by_source.clear()  # one trainer, one buffer: those before are gone
            self._by_source[key] = source.memory()
        return source.at(self._by_source[key])

    def write(self, source: BufferLayout, start: int, data: bytes) -> None:
        """Bytes of the source from `start` on."""
        memory = self._by_source[source.host, source.path, source.inode]
        assert os.pwrite(memory.descriptor, data, start) == len(data)


def read(layout: BufferLayout, start: int, size: int) -> bytes:
    """Bytes of a buffer of this host. Raises `OSError` if it is gone."""
    with opened(layout) as file:
        return os.pread(file.fileno(), size, start)


def opened(layout: BufferLayout, flags: int = os.O_RDONLY) -> IO[bytes]:
    """The memory of a buffer of this host, as a file. Raises `OSError` if it is gone."""
    descriptor = os.open(layout.path, flags)
    if os.fstat(descriptor).st_ino != layout.inode:
        os.close(descriptor)
        raise FileNotFoundError(f"{layout.path} is another file")
    return os.fdopen(descriptor, "rb", buffering=0)


Read = Callable[[BufferLayout, int, int], bytes]
