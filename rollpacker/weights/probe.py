"""Hashes a fixed sample of a model's elements, by which two copies of a model are compared."""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from rollpacker.weights.buckets import Part

SAMPLED_ELEMENTS = 64
"""Number of elements of each tensor that are compared; of a smaller tensor, all."""
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
OUTPUT_LAYERS = ("lm_head.weight", "embed_out.weight")


def weight_probe(named_tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the SHA-256 (hex) of names, shapes and 64 elements of each tensor: the first, the last
    and 62 places between them that follow from the tensor's name and size. The order of the
    tensors does not matter.

    Give whole parameters: sharded ones have to be gathered before. Each device is read in one
    transfer.

    Tied tensors: of two copies of a model, one may list a tied output layer and the other not. So
    an output layer (`OUTPUT_LAYERS`, by the end of its name) is sampled at its embedding's places,
    and left out if it has the embedding's values there. One that is tied on one side and stale on
    the other still gives another hash.
    """
    probe = Probe()
    for _ in probe.of(named_tensors):
        pass
    return probe.hexdigest()


Samples = dict[str, tuple[str, bytes]]
"""Shape and sampled elements of tensors, by name. Elements that were not there are zeros."""


class Probe:
    """A `weight_probe` of tensors that pass by one after the other and are not kept."""

    def __init__(self) -> None:
        self._taken: list[tuple[str, str, Tensor]] = []
        """Name, shape and sampled elements (as bytes) of each tensor that has passed."""

    @torch.no_grad()
    def take_part(self, part: Part, values: Tensor) -> None:
        """Sample a tensor of which only these elements, in one dimension, are here."""
        size = math.prod(part.shape)
        places = _positions(part.name, size) - part.start
        inside = (places >= 0) & (places < len(values))
        dtype: torch.dtype = getattr(torch, part.dtype)
        taken = torch.zeros(len(places) if size else 0, dtype=dtype, device=values.device)
        if inside.any():
            here, there = torch.from_numpy(inside), torch.from_numpy(places[inside])
            taken[here.to(values.device)] = values[there.to(values.device)].to(dtype)
        self._taken.append((part.name, f"{part.shape}", taken.view(torch.uint8)))

    def of(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield these tensors, and sample each before it is yielded."""
        for name, tensor in named_tensors:
            places = torch.from_numpy(_positions(name, tensor.numel())).to(tensor.device)
            with torch.no_grad():
                # `take` needs no contiguous copy of the tensor.
                taken = tensor.detach().take(places) if tensor.numel() else tensor.new_empty(0)
            self._taken.append((name, f"{tuple(tensor.shape)}", taken.view(torch.uint8)))
            yield name, tensor

    def samples(self) -> Samples:
        """Return what was sampled."""
        read = _read([taken for *_, taken in self._taken])
        pairs = zip(self._taken, read, strict=True)
        return {name: (shape, data) for (name, shape, _), data in pairs}

    def hexdigest(self) -> str:
        """Return the hash of all tensors that have passed."""
        return digest_of([self.samples()])


def digest_of(found: Iterable[Samples]) -> str:
    """Return the hash of tensors whose elements were sampled by several processes, each of those
    that it has."""
    merged: Samples = {}
    for name, (shape, data) in (item for one in found for item in one.items()):
        before = np.frombuffer(merged.get(name, ("", bytes(len(data))))[1], np.uint8)
        merged[name] = shape, (np.frombuffer(data, np.uint8) | before).tobytes()
    embeddings = {said for name, said in merged.items() if name.endswith(EMBEDDINGS)}
    digest = hashlib.sha256()
    for name, (shape, data) in sorted(merged.items()):
        if name.endswith(OUTPUT_LAYERS) and (shape, data) in embeddings:
            continue
        digest.update(f"{name} {shape}\n".encode())
        digest.update(data)
    return digest.hexdigest()


def _positions(name: str, size: int) -> np.ndarray:
    """Return flat indices of the elements to sample, [64]; a small tensor repeats its last."""
    key = "embedding" if name.endswith(EMBEDDINGS + OUTPUT_LAYERS) else name
    index = np.arange(SAMPLED_ELEMENTS, dtype=np.uint64)
    last = np.uint64(max(size, 1) - 1)
    if size <= SAMPLED_ELEMENTS:
        return np.minimum(index, last).astype(np.int64)
    seed = np.uint64(zlib.crc32(key.encode()))
    spread = _mixed((seed << np.uint64(32)) + index) % np.uint64(size)
    spread[0], spread[-1] = 0, last
    return spread.astype(np.int64)


def _mixed(values: np.ndarray) -> np.ndarray:
    """Mix the bits of uint64 numbers by SplitMix64's finalizer (Steele et al. 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed


def _read(samples: Sequence[Tensor]) -> list[bytes]:
    """Return the bytes of each of these small tensors."""
    found = [b""] * len(samples)
    for device in {sample.device for sample in samples}:
        here = [i for i, sample in enumerate(samples) if sample.device == device]
        read = torch.cat([samples[i] for i in here]).cpu().numpy().tobytes()
        ends = np.cumsum([len(samples[i]) for i in here])
        for index, end in zip(here, ends, strict=True):
            found[index] = read[end - len(samples[index]) : end]
    return found
