"""Exchanges between ranks of a pipeline outside of sweeps. Stages tell each other numbers and one
tied weight. The shards (processes) of a stage time the network between them, over which weights and
gradients go."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rollpacker.pipeline.stages.times import NUM_BYTES

_CPU = torch.device("cpu")


class Peers(Protocol):
    """Exchanges of numbers and tensors of one stage with the other stages of its pipeline. All
    stages make a call together, except those that send or receive, which concern two stages."""

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Return all stages' values, by stage. Each stage must give equally many numbers."""
        ...

    def send(self, tensor: Tensor, stage: int) -> None: ...

    def receive(self, like: Tensor, stage: int) -> Tensor:
        """Return a tensor that `stage` has sent, of the shape, dtype and device of `like`."""
        ...

    def send_named(self, named: Iterable[tuple[str, Tensor]], stage: int) -> None:
        """Send any number of named tensors, which are in host memory, to `stage`."""
        ...

    def receive_named(self, stage: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and tensors that `stage` has sent by `send_named`."""
        ...


class GroupPeers:
    """Exchanges between stages over a gloo process group in host memory: its rank s is stage s."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Return all stages' values, by stage. Each stage must give equally many numbers."""
        own = torch.tensor(values, dtype=torch.float64)
        found = [torch.empty_like(own) for _ in range(self._group.size())]
        dist.all_gather(found, own, group=self._group)
        return [one.tolist() for one in found]

    def send(self, tensor: Tensor, stage: int) -> None:
        """Send a tensor to `stage`, which must `receive` it."""
        # As bytes: gloo does not know every dtype.
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        dist.send(data, group=self._group, group_dst=stage)

    def receive(self, like: Tensor, stage: int) -> Tensor:
        """Return a tensor that `stage` has sent, of the shape, dtype and device of `like`."""
        found = torch.empty(like.shape, dtype=like.dtype)
        dist.recv(found.reshape(-1).view(torch.uint8), group=self._group, group_src=stage)
        return found.to(like.device)

    def send_named(self, named: Iterable[tuple[str, Tensor]], stage: int) -> None:
        """Send any number of named tensors to `stage`."""
        for name, tensor in named:
            self._send_object((name, tensor.shape, tensor.dtype), stage)
            self.send(tensor, stage)
        self._send_object(None, stage)

    def receive_named(self, stage: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and tensors that `stage` has sent by `send_named`, in host memory."""
        while (about := self._receive_object(stage)) is not None:
            name, shape, dtype = about
            yield name, self.receive(torch.empty(shape, dtype=dtype), stage)

    def _send_object(self, about: Any, stage: int) -> None:
        dist.send_object_list([about], group=self._group, group_dst=stage, device=_CPU)

    def _receive_object(self, stage: int) -> Any:
        found: list[Any] = [None]
        dist.recv_object_list(found, group=self._group, group_src=stage, device=_CPU)
        return found[0]


NUM_TRIPS = 3
"""Number of timed round trips between two ranks. The fastest counts, since chance only slows."""


def round_trips(group: dist.ProcessGroup) -> tuple[tuple[int, float], ...]:
    """Return pairs of a later rank of the group and the seconds of a message there and back. All
    ranks make this call together, and each has one partner at a time."""
    own, found = group.rank(), []
    message = torch.zeros(NUM_BYTES, dtype=torch.uint8)
    for partner in partners_of(own, group.size()):
        seconds = []
        for _ in range(NUM_TRIPS + 1):
            began = time.perf_counter()
            if own < partner:
                dist.send(message, group=group, group_dst=partner)
            dist.recv(message, group=group, group_src=partner)
            if own > partner:
                dist.send(message, group=group, group_dst=partner)
            seconds.append(time.perf_counter() - began)
        if own < partner:
            found.append((partner, min(seconds[1:])))  # the first waits until both are there
    return tuple(sorted(found))


def partners_of(own: int, size: int) -> Iterator[int]:
    """Yield the partners of rank `own` among `size` ranks, turn by turn; every two ranks meet once
    (the circle method)."""
    last = size - 1 if size % 2 == 0 else size
    for turn in range(last):
        if own == last:
            partner = next(one for one in range(last) if (2 * one - turn) % last == 0)
        else:
            partner = (turn - own) % last
            partner = last if partner == own else partner
        if partner < size:
            yield partner
