"""Logs in LevelDB's format, in which W&B and SwanLab keep a run that is not online.

Both write them through a buffer, and a run that is killed loses what is in it: only the file knows
what they hold."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

_HEADER_BYTES = 7
_BLOCK_BYTES = 32768
_FULL, _LAST = 1, 4


def offline_records(path: Path) -> Iterator[bytes]:
    """Every whole record; a last one that was cut off is left out."""
    data = path.read_bytes()
    at, parts = _HEADER_BYTES, b""
    while at + _HEADER_BYTES <= len(data):
        room = _BLOCK_BYTES - at % _BLOCK_BYTES
        if room < _HEADER_BYTES:  # the rest of a block that takes no further header
            at += room
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + _HEADER_BYTES])
        end = at + _HEADER_BYTES + size
        if kind == 0 or end > len(data):
            return
        parts += data[at + _HEADER_BYTES : end]
        at = end
        if kind in (_FULL, _LAST):
            yield parts
            parts = b""
