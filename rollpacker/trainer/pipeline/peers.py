"""The small things that stages tell each other outside of a sweep: numbers, and one tied weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Peers(Protocol):
    """The stages that a pipeline is made of, as one of them sees them. Joint calls of all of
    them, but `send` and `receive`, of the two."""

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Everybody's values, by stage; as many from each."""
        ...

    def send(self, tensor: Tensor, stage: int) -> None: ...

    def receive(self, like: Tensor, stage: int) -> Tensor:
        """What `send` was given there, of the shape, dtype and device of `like`."""
        ...


class GroupPeers:
    """Meets `Peers` with a process group for host memory (gloo), whose rank s is stage s."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """See `Peers`."""
        own = torch.tensor(values, dtype=torch.float64)
        found = [torch.empty_like(own) for _ in range(self._group.size())]
        dist.all_gather(found, own, group=self._group)
        return [one.tolist() for one in found]

    def send(self, tensor: Tensor, stage: int) -> None:
        """See `Peers`."""
        dist.send(tensor.cpu().contiguous(), group=self._group, group_dst=stage)

    def receive(self, like: Tensor, stage: int) -> Tensor:
        """See `Peers`."""
        found = torch.empty(like.shape, dtype=like.dtype)
        dist.recv(found, group=self._group, group_src=stage)
        return found.to(like.device)
