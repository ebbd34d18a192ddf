"""Direct links: the same over torch.distributed."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from rollpacker.pipeline.links.direct_link import (
    DirectReceiver,
    DirectSender,
    direct_group,
)
from rollpacker.pipeline.links.link import Border, LinkLost
from rollpacker.trainer.sharding import Shards
from tests.trainer.pipeline.test_host_link import Arrivals, equal_bits, tensor, wait_until
from tests.trainer.ranks import RankError, Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as started:
        yield started


def test_messages_go_both_ways(ranks: Ranks) -> None:
    assert ranks.run(2, exchange) == [200, 200]


def messages(rank: int) -> list[Tensor]:
    random_ = random.Random(rank)
    return [torch.zeros(0, 3), torch.tensor(2.5), *(tensor(random_) for _ in range(198))]


def exchange(shards: Shards) -> int:
    """Both send and receive at once, and end with no thread left."""
    threads = set(threading.enumerate())
    rank, peer = shards.rank, 1 - shards.rank
    there, back = Border(stages=(0, 1), peer=peer), Border(stages=(1, 0), peer=peer)
    groups = [direct_group((0, 1)), direct_group((0, 1))]
    arrivals, lost = Arrivals(), list[LinkLost]()
    sender = DirectSender((there, back)[rank], groups[rank], on_lost=lost.append)
    receiver = DirectReceiver(
        *((back, there)[rank], groups[peer]),
        on_arrival=lambda number, one: arrivals.all.append((number, one)),
        on_lost=arrivals.lost.append,
    )
    for number, one in enumerate(messages(rank)):
        sender.send(number, one)
    wait_until(lambda: len(arrivals.all) == 200)
    assert [number for number, _ in arrivals.all] == list(range(200))
    assert all(map(equal_bits, (one for _, one in arrivals.all), messages(peer)))
    wait_until(lambda: len(sender._times) == 200)
    assert [one.number for one in receiver.times()] == list(range(200))
    sender.close()
    wait_until(lambda: len(arrivals.lost) == 1)  # the other one has closed too
    assert "closed there" in str(arrivals.lost[0]) and str(receiver._border) in str(
        arrivals.lost[0]
    )
    receiver.close()
    wait_until(lambda: set(threading.enumerate()) <= threads)
    assert lost == []
    return len(arrivals.all)


def test_a_peer_that_dies_is_named(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="rank 1 of 2: the process ended") as error:
        ranks.run(2, one_dies)
    assert "heard: the link from stage 1 to stage 0, with process 1 of the trainer" in str(
        error.value
    )


def one_dies(shards: Shards) -> None:
    group = direct_group((0, 1))
    if shards.rank == 1:
        os._exit(1)
    heard: list[LinkLost] = []
    back = Border(stages=(1, 0), peer=1)
    DirectReceiver(back, group, on_arrival=lambda *_: None, on_lost=heard.append)
    wait_until(lambda: len(heard) == 1)
    raise AssertionError(f"heard: {heard[0]}")
