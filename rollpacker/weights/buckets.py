"""Buckets in which weights travel: what lies where in each, and memory for them that processes of
one machine share: a file in memory, or memory of a CUDA device.

The process that makes such memory tells others by numbers and texts how to map it. Importing this
is quick: torch comes with the first bucket.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rollpacker.weights.buffer import Memory

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_ALIGNMENT = 16
STAMP_BYTES = 8
"""Bytes of the stamp behind a sender's part of a bucket."""
_VERSION, _BUCKET = 1_000_003, 7_368_787
"""Factors of version and bucket's number in a stamp."""


class Part(NamedTuple):
    """Elements of one tensor that one sender holds, which are adjacent in the whole tensor."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: str
    """Name of the dtype in which the tensor is sent, such as bfloat16."""
    start: int
    """Number of elements of the whole tensor that come before these."""
    length: int


class Span(NamedTuple):
    """Adjacent elements of a tensor in a bucket."""

    part: Part
    start: int
    """Number of elements of the whole tensor before these."""
    length: int
    at: int
    """Number of bytes before these in the sender's part of the bucket."""


Bucket = list[list[Span]]
"""For each sender its spans in the bucket."""


def buckets_of(parts: Sequence[Sequence[Part]], most_bytes: int) -> list[Bucket]:
    """Distribute the parts that each sender holds over buckets of at most `most_bytes`. The parts
    of a tensor are adjacent, so that whoever puts tensors together keeps few that are not whole."""
    import torch

    holders: dict[str, list[tuple[int, Part]]] = {}
    for sender, own in enumerate(parts):
        for part in own:
            holders.setdefault(part.name, []).append((sender, part))
    buckets: list[Bucket] = [[[] for _ in parts]]
    ends, room = [0] * len(parts), most_bytes
    for sender, part in (one for of_name in holders.values() for one in of_name):
        size = getattr(torch, part.dtype).itemsize
        done = 0
        if not part.length:
            buckets[-1][sender].append(Span(part, part.start, 0, ends[sender]))
        while done < part.length:
            if (count := min(part.length - done, room // size)) == 0:
                buckets.append([[] for _ in parts])
                ends, room = [0] * len(parts), most_bytes
                continue
            span = Span(part, part.start + done, count, ends[sender])
            buckets[-1][sender].append(span)
            num_bytes = -(-count * size // _ALIGNMENT) * _ALIGNMENT
            ends[sender] += num_bytes
            room, done = max(room - num_bytes, 0), done + count
    return buckets


def end_of(spans: Sequence[Span]) -> int:
    """Return the number of bytes of a sender's part of a bucket, without the stamp."""
    import torch

    if not spans:
        return 0
    size: int = getattr(torch, spans[-1].part.dtype).itemsize
    return spans[-1].at + -(-spans[-1].length * size // _ALIGNMENT) * _ALIGNMENT


def stamp_of(data: Tensor, version: int, bucket: int) -> Tensor:
    """Return the stamp of a sender's part of a bucket, a tensor of one int64."""
    import torch

    return data.view(torch.int64).sum() + (version * _VERSION + bucket * _BUCKET)


def values_in(slot: Tensor, span: Span) -> Tensor:
    import torch

    dtype: torch.dtype = getattr(torch, span.part.dtype)
    return slot[span.at : span.at + span.length * dtype.itemsize].view(dtype)


def parts_of(told: bytes) -> list[Part]:
    return [Part(name, tuple(shape), *rest) for name, shape, *rest in json.loads(told)]


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
