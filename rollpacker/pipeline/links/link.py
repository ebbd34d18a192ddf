"""The interfaces of the two ends of a link, which carries tensors from one pipeline stage to the
next or back: one direction over one border between two stages.

Messages are numbered from 0 in the order in which they are sent. Each arrives once, in that order,
bit for bit. A link that can no longer deliver them so is *lost*: it reports the loss once, and
carries nothing more.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from rollpacker.trainer.trainer import TrainerProcessError

_Times = TypeVar("_Times")
OnArrival = Callable[[int, Tensor], None]
"""A function that a link calls with each arriving message's number and tensor, in order, in one of
its threads. It must not raise, and should only store the tensor: the next message waits for it."""
MAX_TIMES = 4096
"""The most messages of which an end of a link keeps the times; older ones are dropped."""


class LinkLost(TrainerProcessError):
    """Raised if a link between two pipeline stages is lost. The run can be resumed."""


OnLost = Callable[[LinkLost], None]
"""A function that is called once, in a thread of the link, when the link is lost and was not closed
at this end. It must not close the link, since it runs in one of the link's threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Border:
    """The two stages that a link connects, and the process at its other end, for messages."""

    stages: tuple[int, int]
    """Numbers of the sending stage and of the receiving stage."""
    peer: int
    """The rank of the process at the link's other end."""

    def __str__(self) -> str:
        return f"the link from stage {self.stages[0]} to stage {self.stages[1]}"

    def lost(self, why: str, address: str) -> LinkLost:
        """Return a `LinkLost` with reason `why` and the `address` where the other end should be."""
        return LinkLost(
            f"{self}, with process {self.peer} of the trainer at {address}, is lost: {why}. No "
            "update of this step was kept; --resume goes on from the last checkpoint"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SendTimes:
    """Times of one sent message in seconds, by the sender's clock (`time.monotonic`)."""

    number: int
    num_bytes: int
    posted_s: float
    """The time at which `send` was called with the message's tensor."""
    started_s: float
    """The time at which the first byte of the message was given to the network; if the message had
    to be repeated, the last such time."""
    acknowledged_s: float
    """The time at which the sender learnt that the message had arrived. A direct link knows only
    that the message has left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalTimes:
    """Times of one received message in seconds. Two processes' clocks differ, perhaps two hosts':
    the difference is part of `seconds`, and cancels when a message there and one back are added
    up."""

    number: int
    num_bytes: int
    posted_s: float
    """The time at which `send` was called with the message's tensor, by the sender's clock."""
    arrived_s: float
    """The time at which the whole message had been received, by the receiver's clock."""

    @property
    def seconds(self) -> float:
        """Seconds from the call of `send` until the whole message had arrived."""
        return self.arrived_s - self.posted_s


class Sender(Protocol):
    """The end of a link at which a stage sends tensors to a neighbouring stage."""

    def send(self, number: int, tensor: Tensor, *, posted_s: float | None = None) -> None:
        """Begin to send tensor `number`, counted from 0, and return at once. The tensor must not be
        changed until the other stage has it. `posted_s`: the time to record for this call, by
        `time.monotonic`; None: now. Raises `LinkLost` once the link is lost."""
        ...

    def times(self) -> list[SendTimes]:
        """Return the times of the messages that came through since the last call of this method."""
        ...

    def close(self) -> None:
        """End threads and connections; messages that have not arrived are dropped. Idempotent."""
        ...


class Receiver(Protocol):
    """The end of a link at which tensors arrive: it calls `on_arrival` with each of them."""

    def times(self) -> list[ArrivalTimes]:
        """Return the times of the messages that arrived since the last call of this method."""
        ...

    def close(self) -> None:
        """End threads and connections; `on_arrival` is not called any more. Idempotent."""
        ...


class Loss:
    """State of one end of a link: open, closed or lost. It is closed or lost once and for all."""

    def __init__(self, on_lost: OnLost) -> None:
        self.over = threading.Event()
        """Set once the link is closed or lost: it carries nothing more."""
        self.error: LinkLost | None = None
        self._on_lost = on_lost
        self._lock = threading.Lock()

    def lose(self, error: LinkLost) -> None:
        with self._lock:
            if self.over.is_set():
                return
            self.error = error
            self.over.set()
        self._on_lost(error)

    def close(self) -> bool:
        """Close this end of the link. Returns whether it was neither closed nor lost before."""
        with self._lock:
            was_open = not self.over.is_set()
            self.over.set()
            return was_open

    def check(self) -> None:
        """Raise `LinkLost` if the link is lost."""
        if self.error is not None:
            raise self.error


def taken(times: deque[_Times]) -> list[_Times]:
    """Empty a queue to which another thread may be adding, and return its items as a list."""
    return [times.popleft() for _ in range(len(times))]
