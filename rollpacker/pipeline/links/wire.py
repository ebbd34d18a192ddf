"""Tensors and acknowledgements as bytes on a connection. The bytes cannot execute anything.

The sender sends a HEADER, then the tensor's bytes as they lie in memory, row by row. The receiver
sends an ANSWER at any time.
"""

from __future__ import annotations

import math
import struct
import zlib
from typing import Literal, NamedTuple

import torch
from torch import Tensor

MAX_DIMS = 6
HEADER = struct.Struct(f">BBBxQQdI{MAX_DIMS}QI")
"""Layout of a header: kind (TENSOR or BYE), dtype, number of dimensions; the message's number, its
bytes, the time it was sent, checksum of its bytes; shape; checksum of the header."""
ANSWER = struct.Struct(">BQ")
"""Layout of a receiver's answer: its kind, and the lowest number of a message not delivered yet."""
TENSOR, BYE = range(1, 3)
"""Kinds of headers. TENSOR: a tensor's bytes follow. BYE: the sender closes the link."""
ALIVE, DELIVERED, CLOSED = range(1, 4)
"""Kinds of answers: the receiver is alive, has delivered a message, or closes the link."""
_CHECKSUM = struct.Struct(">I")
_DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


class Header(NamedTuple):
    """The header of a message between two stages, which comes before the bytes of its tensor."""

    kind: Literal[1, 2]
    number: int
    num_bytes: int
    posted_s: float
    checksum: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU, as bytes without a copy."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)


def fits(tensor: Tensor) -> bool:
    """Return whether a message can hold a tensor of this dtype and number of dimensions."""
    return tensor.dtype in _CODES and tensor.ndim <= MAX_DIMS


def packed_header(number: int, tensor: Tensor, posted_s: float, checksum: int = 0) -> bytes:
    assert fits(tensor)
    shape = (*tensor.shape, *(0,) * (MAX_DIMS - tensor.ndim))
    fields = (TENSOR, _CODES[tensor.dtype], tensor.ndim, number, tensor.nbytes, posted_s, checksum)
    return _sealed(HEADER.pack(*fields, *shape, 0))


def packed_bye() -> bytes:
    return _sealed(HEADER.pack(BYE, 0, 0, 0, 0, 0.0, 0, *(0,) * MAX_DIMS, 0))


def read_header(data: bytes | bytearray, max_bytes: int) -> Header:
    """Decode a header. Raises `ValueError` for bytes that `packed_header` cannot have made, and for
    a message of more than `max_bytes`."""
    kind, code, num_dims, number, num_bytes, posted_s, checksum, *dims, _ = HEADER.unpack(data)
    sound = _sealed(bytes(data)) == bytes(data) and kind in (TENSOR, BYE)
    if not sound or code >= len(_DTYPES) or num_dims > MAX_DIMS:
        raise ValueError("bytes that are no header")
    dtype, shape = _DTYPES[code], tuple(dims[:num_dims])
    if kind == TENSOR and num_bytes != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{num_bytes} bytes for {dtype} of shape {shape}")
    if num_bytes > max_bytes:
        raise ValueError(f"a message of {num_bytes} bytes, and {max_bytes} are the most")
    return Header(kind, number, num_bytes, posted_s, checksum, dtype, shape)


def _sealed(header: bytes) -> bytes:
    body = header[: -_CHECKSUM.size]
    return body + _CHECKSUM.pack(zlib.crc32(body))
