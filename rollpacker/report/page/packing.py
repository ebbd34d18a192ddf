"""Packs data for the page: JSON, with arrays and tables of texts beside the JSON as bytes.

    b"RPPK" | length of the JSON (uint32) | JSON | arrays; each part padded to 8 bytes

In the JSON an array stands as `{"@": [type, offset, length]}`, its offset counted from the first
array, and a table of texts as `{"@s": [offsets, bytes]}`. `files/data.js` reads it. JSON alone
would hold 100,000 rows in three times the bytes, and take a browser ten times as long.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_TYPES = {
    np.dtype("uint8"): "u1",
    np.dtype("int32"): "i4",
    np.dtype("uint32"): "u4",
    np.dtype("float32"): "f4",
    np.dtype("float64"): "f8",
}


class Texts(list[str]):
    r"""A list of texts, which `pack` writes as UTF-8. What UTF-8 lacks becomes `\udXXX`."""


class _Packer:
    def __init__(self) -> None:
        self.blobs: list[bytes] = []
        self.size = 0

    def plain(self, value: Any) -> Any:
        """`value` as JSON holds it: an array's bytes go to `blobs`, its place into the result."""
        if isinstance(value, np.ndarray):
            return {"@": self._array(value)}
        if isinstance(value, Texts):
            return {"@s": self._texts(value)}
        if isinstance(value, Mapping):
            return {str(key): self.plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.plain(item) for item in value]
        if isinstance(value, float) and not math.isfinite(value):
            return None
        return value

    def _array(self, array: np.ndarray[Any, Any]) -> list[Any]:
        place = self.size
        self._put(np.ascontiguousarray(array).tobytes())
        return [_TYPES[array.dtype], place, int(array.size)]

    def _texts(self, texts: Sequence[str]) -> list[Any]:
        parts = [text.encode("utf-8", "backslashreplace") for text in texts]
        ends = np.cumsum([0, *map(len, parts)], dtype=np.uint32)
        return [self._array(ends), self._array(np.frombuffer(b"".join(parts), dtype=np.uint8))]

    def _put(self, blob: bytes) -> None:
        self.blobs.append(blob + b"\0" * (-len(blob) % 8))
        self.size += len(self.blobs[-1])


def pack(value: Mapping[str, Any]) -> bytes:
    """Returns `value` as bytes. It may hold mappings, lists, texts, numbers, numpy arrays (of a
    type in `_TYPES`) and `Texts`. Infinite numbers and NaN outside of arrays become null."""
    packer = _Packer()
    head = json.dumps(packer.plain(value), separators=(",", ":")).encode()
    start = b"RPPK" + len(head).to_bytes(4, "little") + head
    return b"".join([start + b"\0" * (-len(start) % 8), *packer.blobs])


def embedded(packed: bytes) -> str:
    """Packed bytes as compressed base64, so that they can stand in HTML and hold no markup."""
    return base64.b64encode(gzip.compress(packed, 9, mtime=0)).decode()
