"""One direction of a border, over the kind of link that is in use. Between two steps, when nothing
is on its way, another kind may be taken into use: messages are numbered on, as if it were one."""

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
    """Meets `Sender`. It needs `add` and `use` first."""

    def __init__(self) -> None:
        self._links: dict[LinkKind, Sender] = {}
        self._num_sent: Counter[LinkKind] = Counter()

    def add(self, kind: LinkKind, link: Sender) -> None:
        self._links[kind] = link

    def use(self, kind: LinkKind) -> None:
        """Use the link of this kind from the next message on."""
        self._kind = kind

    def send(self, number: int, tensor: Tensor, *, posted_s: float | None = None) -> None:
        """See `Sender`."""
        assert number == self._num_sent.total(), f"message {number} is out of order"
        self._links[self._kind].send(self._num_sent[self._kind], tensor, posted_s=posted_s)
        self._num_sent[self._kind] += 1

    def times(self) -> list[SendTimes]:
        """See `Sender`. Of the link in use, by its own numbers."""
        return self._links[self._kind].times()

    def close(self) -> None:
        """See `Sender`."""
        for link in self._links.values():
            link.close()


class SwitchedReceiver:
    """Meets `Receiver`. It needs `add` and `use` first."""

    def __init__(self, on_arrival: OnArrival) -> None:
        self._on_arrival = on_arrival
        self._links: dict[LinkKind, Receiver] = {}
        self._num_arrived: Counter[LinkKind] = Counter()

    def arrival_over(self, kind: LinkKind) -> OnArrival:
        """The function that the link of this kind calls for each message that arrives."""

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
        """Messages that came over other kinds of links so far."""

    def times(self) -> list[ArrivalTimes]:
        """See `Receiver`. Of the link in use, numbered since the start."""
        found = self._links[self._kind].times()
        return [dataclasses.replace(one, number=self._before + one.number) for one in found]

    def close(self) -> None:
        """See `Receiver`."""
        for link in self._links.values():
            link.close()
