"""One direction of a border, over the kind of link that is in use. Between two steps, when nothing
is on its way, the kind may be changed: messages are numbered on, as if over one link."""

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
    """A `Sender` over the link in use. Call `add` and `use` first."""

    def __init__(self) -> None:
        self._links: dict[LinkKind, Sender] = {}
        self._num_sent: Counter[LinkKind] = Counter()

    def add(self, kind: LinkKind, link: Sender) -> None:
        self._links[kind] = link

    def use(self, kind: LinkKind) -> None:
        """Use the link of this kind from the next message on."""
        self._kind = kind

    def send(self, number: int, tensor: Tensor, *, posted_s: float | None = None) -> None:
        """Send a tensor over the link in use; see `Sender.send`."""
        assert number == self._num_sent.total(), f"message {number} is out of order"
        self._links[self._kind].send(self._num_sent[self._kind], tensor, posted_s=posted_s)
        self._num_sent[self._kind] += 1

    def times(self) -> list[SendTimes]:
        """Return the records of messages over the link in use, by that link's own numbers."""
        return self._links[self._kind].times()

    def close(self) -> None:
        """Close the links of all kinds."""
        for link in self._links.values():
            link.close()


class SwitchedReceiver:
    """A `Receiver` over the link in use. Call `add` and `use` first."""

    def __init__(self, on_arrival: OnArrival) -> None:
        self._on_arrival = on_arrival
        self._links: dict[LinkKind, Receiver] = {}
        self._num_arrived: Counter[LinkKind] = Counter()

    def arrival_over(self, kind: LinkKind) -> OnArrival:
        """Return the function that the link of this kind must call for each arriving message."""

        def arrive(number: int, tensor: Tensor) -> None:
            assert number == self._num_arrived[kind], f"message {number} is out of order"
            self._num_arrived[kind] += 1
            self._on_arrival(self._num_arrived.total() - 1, tensor)

        return arrive

    def add(self, kind: LinkKind, link: Receiver) -> None:
        self._links[kind] = link

    def use(self, kind: LinkKind) -> None:
        """Use the link of this kind from the next message on."""
        self._kind = kind
        self._before = self._num_arrived.total() - self._num_arrived[kind]
        """Number of messages that came over other kinds of links so far."""

    def times(self) -> list[ArrivalTimes]:
        """Return the records of messages over the link in use, numbered since the start."""
        found = self._links[self._kind].times()
        return [dataclasses.replace(one, number=self._before + one.number) for one in found]

    def close(self) -> None:
        """Close the links of all kinds."""
        for link in self._links.values():
            link.close()
