"""Messages in a stream of bytes. A message is a header of fixed length and as many bytes as the
header gives, up to a bound that the reader sets."""

from __future__ import annotations

import struct
from typing import NamedTuple

HEADER = struct.Struct(">BQQ")
"""Header of a message: its kind, the number of its call, the number of bytes that follow."""
MAX_BYTES = 16 << 30
"""Default for the most bytes of one message: a guard against nonsense, not a limit for work."""


class Message(NamedTuple):
    kind: int
    number: int
    payload: bytes


def packed(kind: int, number: int, payload: bytes) -> bytes:
    return HEADER.pack(kind, number, len(payload)) + payload


class Frames:
    """Cuts a stream of bytes into messages of at most `max_bytes` each."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that these bytes complete. Raises `ValueError` for a message of more
        than `max_bytes`."""
        self._buffer += data
        found = []
        while len(self._buffer) >= HEADER.size:
            kind, number, length = HEADER.unpack_from(self._buffer)
            if length > self.max_bytes:
                raise ValueError(f"a message of {length} bytes")
            end = HEADER.size + length
            if len(self._buffer) < end:
                break
            found.append(Message(kind, number, bytes(self._buffer[HEADER.size : end])))
            del self._buffer[:end]
        return found
