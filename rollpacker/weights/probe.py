"""Hashes a fixed sample of a model's elements, by which two copies of a model are compared."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

SAMPLED_ELEMENTS = 64
"""Number of elements of each tensor that are compared; of a smaller tensor, all."""
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
OUTPUT_LAYERS = ("lm_head.weight", "embed_out.weight")


@torch.no_grad()
def weight_probe(
    named_tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None
) -> str:
    """Return the SHA-256 (hex) of names, shapes and 64 elements of each tensor: the first, the last
    and 62 places between them that follow from the tensor's name and size. The order of the
    tensors does not matter.

    Floating-point tensors are cast to `dtype` first, so that a trainer's float32 can be compared
    with an engine's bfloat16. Give whole parameters: sharded ones have to be gathered before. Each
    device is read in one transfer.

    Tied tensors: of two copies of a model, one may list a tied output layer and the other not. So
    an output layer (`OUTPUT_LAYERS`, by the end of its name) is sampled at its embedding's places,
    and left out if it has the embedding's values there. One that is tied on one side and stale on
    the other still gives another hash.
    """
    tensors = sorted(named_tensors, key=lambda item: item[0])
    samples = _sample([t.detach() for _, t in tensors], _positions(tensors), dtype)
    shapes = [f"{tuple(tensor.shape)}" for _, tensor in tensors]
    embeddings = {
        (shape, sample)
        for (name, _), shape, sample in zip(tensors, shapes, samples, strict=True)
        if name.endswith(EMBEDDINGS)
    }
    digest = hashlib.sha256()
    for (name, _), shape, sample in zip(tensors, shapes, samples, strict=True):
        if name.endswith(OUTPUT_LAYERS) and (shape, sample) in embeddings:
            continue
        digest.update(f"{name} {shape}\n".encode())
        digest.update(sample)
    return digest.hexdigest()


def _positions(tensors: Sequence[tuple[str, Tensor]]) -> np.ndarray:
    """Return flat indices of elements to sample, [tensors, 64]; a small tensor repeats its last."""
    keys = [
        "embedding" if name.endswith(EMBEDDINGS + OUTPUT_LAYERS) else name for name, _ in tensors
    ]
    sizes = np.array([tensor.numel() for _, tensor in tensors], dtype=np.uint64)[:, None]
    seeds = np.array([zlib.crc32(key.encode()) for key in keys], dtype=np.uint64)[:, None]
    index = np.arange(SAMPLED_ELEMENTS, dtype=np.uint64)[None]
    last = np.maximum(sizes, 1) - 1
    spread = _mixed((seeds << np.uint64(32)) + index) % np.maximum(sizes, 1)
    spread[:, :1] = 0
    spread[:, -1:] = last
    whole = np.minimum(index, last)
    return np.where(sizes <= SAMPLED_ELEMENTS, whole, spread).astype(np.int64)


def _mixed(values: np.ndarray) -> np.ndarray:
    """Mix the bits of uint64 numbers by SplitMix64's finalizer (Steele et al. 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed


def _sample(
    tensors: Sequence[Tensor], positions: np.ndarray, dtype: torch.dtype | None
) -> list[bytes]:
    """Return for each tensor the bytes of its elements at `positions`. Floats are cast to `dtype`
    before; None: they are not."""
    samples: list[bytes] = [b""] * len(tensors)
    for device in {tensor.device for tensor in tensors}:
        here = [i for i, t in enumerate(tensors) if t.device == device and t.numel()]
        if not here:
            continue
        places = torch.from_numpy(positions[here]).to(device)
        pieces = []
        for row, index in zip(places.unbind(), here, strict=True):
            taken = tensors[index].take(row)  # needs no contiguous copy of the tensor
            if dtype is not None and taken.is_floating_point():
                taken = taken.to(dtype)
            pieces.append(taken.view(torch.uint8))
        sizes = [len(piece) for piece in pieces]
        read = torch.cat(pieces).cpu().numpy().tobytes()
        ends = np.cumsum(sizes)
        for index, size, end in zip(here, sizes, ends, strict=True):
            samples[index] = read[end - size : end]
    return samples
