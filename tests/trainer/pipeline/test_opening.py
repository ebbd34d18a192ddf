"""The links of all stages at once, and an executor's sweeps over them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rollpacker.core.pipeline import ReadyFirst
from rollpacker.trainer.pipeline.cut import Place
from rollpacker.trainer.pipeline.executor import Executor
from rollpacker.trainer.pipeline.links.opening import LinkKind, open_links
from rollpacker.trainer.sharding import Shards
from tests.trainer.pipeline.test_host_link import wait_until
from tests.trainer.ranks import Ranks

NUM_STAGES = 3
TOKENS = [7, 300, 2, 41, 5]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(NUM_STAGES) as started:
        yield started


class Sums:
    """Each stage adds its number to what comes, and doubles what comes back."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.last: dict[int, Tensor] = {}
        self.first: dict[int, Tensor] = {}

    def forward(self, micro_batch: int, arrived: Tensor | None) -> Tensor:
        own = torch.full((TOKENS[micro_batch], 2), float(micro_batch))
        self.last[micro_batch] = (own if arrived is None else arrived) + self._place.index
        return self.last[micro_batch]

    def backward(self, micro_batch: int, arrived: Tensor | None) -> Tensor:
        self.first[micro_batch] = (self.last[micro_batch] if arrived is None else arrived) * 2
        return self.first[micro_batch]

    def weights(self, micro_batch: int) -> None:
        pass


@pytest.mark.parametrize("kind", ["host", "direct"])
def test_sweeps_run_over_them(ranks: Ranks, kind: LinkKind) -> None:
    found = ranks.run(NUM_STAGES, sweep_twice, kind)
    assert found[0] == [(float(m) + 3) * 2**NUM_STAGES for m in range(len(TOKENS))]


def sweep_twice(shards: Shards, kind: LinkKind) -> list[float]:
    threads = set(threading.enumerate())
    place = Place(index=shards.rank, count=NUM_STAGES)
    executor = Executor(place, timeout_s=60)
    group = dist.group.WORLD
    assert group is not None
    hosts = ("127.0.0.1", "127.0.0.2")
    links = open_links(kind, group, on_arrival=executor.arrive, on_lost=executor.fail, hosts=hosts)
    executor.connect(links.to_next, links.to_previous)
    for _ in range(2):
        ops = Sums(place)
        executor.sweep(TOKENS, ops, ReadyFirst(place.index))
    dist.barrier()
    links.close()
    wait_until(lambda: set(threading.enumerate()) <= threads)
    first = ops.first
    assert all(first[m].shape == (TOKENS[m], 2) for m in first)
    assert all(bool((first[m] == first[m][0, 0]).all()) for m in first)
    return [first[m][0, 0].item() for m in sorted(first)]
