"""Delays on purpose: when messages come, by the clock that the test sets the marks on."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from rollpacker.pipeline.links.link import SendTimes
from tests.trainer.pipeline.injected import Delay, InjectedSender
from tests.trainer.pipeline.test_host_link import wait_until


class Inner:
    """Notes when it gets what."""

    def __init__(self) -> None:
        self.got: list[tuple[int, float, float]] = []
        self.error: Exception | None = None
        self.is_closed = False

    def send(self, number: int, tensor: Tensor, *, posted_s: float | None = None) -> None:
        if self.error is not None:
            raise self.error
        assert posted_s is not None
        self.got.append((number, posted_s, time.monotonic()))

    def times(self) -> list[SendTimes]:
        return []

    def close(self) -> None:
        self.is_closed = True


def test_messages_wait_and_the_sender_does_not() -> None:
    for latency_s, number_to_come in ((1e6, 0), (0.05, 20)):
        inner = Inner()
        sender = InjectedSender(inner, Delay(latency_s=latency_s))
        for number in range(20):
            sender.send(number, torch.zeros(1))
        wait_until(lambda seen=inner, number=number_to_come: len(seen.got) == number)
        assert [number for number, _, _ in inner.got] == list(range(number_to_come))
        assert all(came_s - posted_s >= latency_s for _, posted_s, came_s in inner.got)
        sender.close()
        assert inner.is_closed


def test_a_blocking_one_returns_when_its_message_has_left() -> None:
    inner = Inner()
    sender = InjectedSender(inner, Delay(latency_s=0.05), is_blocking=True)
    for number in range(3):
        before = time.monotonic()
        sender.send(number, torch.zeros(1))
        assert time.monotonic() - before >= 0.05
        assert len(inner.got) == number + 1
    sender.close()


def test_bytes_queue_behind_each_other_and_latency_does_not_add_up() -> None:
    sender = InjectedSender(Inner(), Delay(latency_s=5.0, bytes_per_s=100.0))
    now = 1000.0
    assert [sender._crossed(now, 50) - now for _ in range(3)] == [5.5, 6.0, 6.5]
    assert sender._crossed(now + 10, 50) - now == 15.5  # the link has been free for a while
    sender.delay = Delay()
    assert sender._crossed(now + 12, 50) - now == 15.5  # nothing overtakes
    assert sender._crossed(now + 20, 50) - now == 20.0
    sender.close()


def test_jitter_is_drawn_by_the_seed_and_reorders_nothing() -> None:
    def drawn(seed: int) -> list[float]:
        sender = InjectedSender(Inner(), Delay(latency_s=0.1, jitter_s=0.05), seed=seed)
        found = [sender._crossed(1000.0 + at, 1) - 1000.0 - at for at in range(500)]
        sender.close()
        return found

    assert drawn(1) == drawn(1) != drawn(2)
    assert min(drawn(1)) >= 0.0
    assert abs(sum(drawn(1)) / 500 - 0.1) < 0.01
    sender = InjectedSender(Inner(), Delay(latency_s=0.1, jitter_s=0.05))
    crowded = [sender._crossed(1000.0, 1) for _ in range(100)]
    assert crowded == sorted(crowded)
    sender.close()


def test_a_lost_link_is_heard_of_at_the_next_message() -> None:
    inner = Inner()
    inner.error = RuntimeError("lost")
    sender = InjectedSender(inner, Delay())
    sender.send(0, torch.zeros(1))
    wait_until(lambda: sender._failure is not None)
    with pytest.raises(RuntimeError, match="lost"):
        sender.send(1, torch.zeros(1))
    sender.close()
