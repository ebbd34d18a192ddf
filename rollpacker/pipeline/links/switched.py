"""Sends or receives tensors over the kind of link in use, direct or host. Between two steps, with
no message on its way, the kind may be changed. Messages are numbered on, as if over one link."""

from __future__ import annotations

import dataclasses
from collections import Counter

from torch import Tensor

from rollpacker.pipeline.links.link import (
    ArrivalTimes,
    OnArrival,
    Receiver,
    Sender,
    SendTimes,
)
from rollpacker.pipeline.plan.link_choice import LinkKind


class SwitchedSender:
    """Sends tensors to a stage over the kind of link in use. Call `add` and `use` first."""

    def __init__(self) -> None:
        self._links: dict[LinkKind, Sender] = {}
        self._num_sent: Counter[LinkKind] = Counter()

    def add(self, kind: LinkKind, link: Sender) -> None:
        self._links[kind] = link

    def use(self, kind: LinkKind) -> None:
        """Use this kind of link, direct or host, from the next message on."""
        self._kind = kind

    def send(self, number: int, tensor: Tensor, *, posted_s: float | None = None) -> None:
        """Begin to send message `number`, counted over both kinds of links (see `Sender.send`)."""
        assert number == self._num_sent.total(), f"message {number} is out of order"
        self._links[self._kind].send(self._num_sent[self._kind], tensor, posted_s=posted_s)
        self._num_sent[self._kind] += 1

    def times(self) -> list[SendTimes]:
        """Return the times of messages sent since the last call over the kind of link in use. Their
        numbers count the messages of that kind alone."""
        return self._links[self._kind].times()

    def close(self) -> None:
        """Close both links, the direct one and the host one, as far as they were added."""
        for link in self._links.values():
            link.close()


class SwitchedReceiver:
    """Receives tensors from a stage over the kind of link in use. Call `add` and `use` first."""

    def __init__(self, on_arrival: OnArrival) -> None:
        self._on_arrival = on_arrival
        self._links: dict[LinkKind, Receiver] = {}
        self._num_arrived: Counter[LinkKind] = Counter()

    def arrival_over(self, kind: LinkKind) -> OnArrival:
        """Return the function that the link of this kind must call with each arriving message."""

        def arrive(number: int, tensor: Tensor) -> None:
            assert number == self._num_arrived[kind], f"message {number} is out of order"
            self._num_arrived[kind] += 1
            self._on_arrival(self._num_arrived.total() - 1, tensor)

        return arrive

    def add(self, kind: LinkKind, link: Receiver) -> None:
        self._links[kind] = link

    def use(self, kind: LinkKind) -> None:
        """Use this kind of link, direct or host, from the next message on."""
        self._kind = kind
        self._before = self._num_arrived.total() - self._num_arrived[kind]
        """Number of messages that arrived over the other kind of link; added to this kind's."""

    def times(self) -> list[ArrivalTimes]:
        """Return the times of messages arrived since the last call, numbered over both links."""
        found = self._links[self._kind].times()
        return [dataclasses.replace(one, number=self._before + one.number) for one in found]

    def close(self) -> None:
        """Close both links, the direct one and the host one, as far as they were added."""
        for link in self._links.values():
            link.close()
