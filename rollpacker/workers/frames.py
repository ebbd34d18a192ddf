"""Messages in a stream of bytes. Each is a header of fixed length and then as many bytes as that
says, up to a bound that the reader sets."""

from __future__ import annotations

import struct
from typing import NamedTuple

HEADER = struct.Struct(">BQQ")
"""The kind of the message, the number of the call that it belongs to, the bytes that follow."""
MAX_BYTES = 16 << 30
"""The default bound of one message. It is meant to catch nonsense, not to limit work."""


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
        """Return the messages that are complete now. Raises `ValueError` for one that is too
        long."""
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
