"""How long a message takes between two shards of a stage, there and back: the network that weights
and gradients go through."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from rollpacker.pipeline.stages.times import NUM_BYTES

NUM_TRIPS = 3
"""The fastest counts: chance makes a message slow, and never fast."""


def round_trips(group: dist.ProcessGroup) -> tuple[tuple[int, float], ...]:
    """To each later rank of the group, by number: seconds. A joint call, in rounds: everybody has
    one partner at a time."""
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
    """In each round, of so many; every two meet once (the circle method)."""
    last = size - 1 if size % 2 == 0 else size
    for turn in range(last):
        if own == last:
            partner = next(one for one in range(last) if (2 * one - turn) % last == 0)
        else:
            partner = (turn - own) % last
            partner = last if partner == own else partner
        if partner < size:
            yield partner
