"""The interfaces of a link's two ends. A link is one direction over one border between two stages.

Messages are numbered from 0 in the order in which they are sent. Each message arrives once, in that
order, bit for bit. A link that cannot keep this up is *lost*: it reports so once, and carries
nothing more.
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
"""A function that is given each message's number and tensor, in order, in a thread of the link. It
must not raise, and should only store the tensor: while it runs, nothing else arrives."""
MAX_TIMES = 4096
"""The most records of messages that a link keeps; older records are dropped."""


class LinkLost(TrainerProcessError):
    """A link carries nothing more. The run can be resumed."""


OnLost = Callable[[LinkLost], None]
"""A function that is called once, in a thread of the link, when the link is lost and was not closed
at this end. It must not close the link, since it runs in one of the link's threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Border:
    """One direction between two stages, as messages to people name it."""

    stages: tuple[int, int]
    """The sending stage and the receiving stage."""
    peer: int
    """The rank at the other end."""

    def __str__(self) -> str:
        return f"the link from stage {self.stages[0]} to stage {self.stages[1]}"

    def lost(self, why: str, address: str) -> LinkLost:
        """Return the error of a lost link. `address` is where the peer is or should be."""
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
    """The time at which `send` was called."""
    started_s: float
    """The time at which the first byte was handed on; for a message that was sent again, the last
    such time."""
    acknowledged_s: float
    """The time at which the sender learnt that the message had arrived. A direct link knows only
    that the message has left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalTimes:
    """Times of one received message in seconds. The clocks are those of two processes, perhaps of
    two hosts: their difference is part of `seconds`, and cancels in a message there and one
    back."""

    number: int
    num_bytes: int
    posted_s: float
    """The time at which `send` was called, by the sender's clock."""
    arrived_s: float
    """The time at which the whole message was received, by the receiver's clock."""

    @property
    def seconds(self) -> float:
        """Seconds from posting to arrival."""
        return self.arrived_s - self.posted_s


class Sender(Protocol):
    """The sending end of a link."""

    def send(self, number: int, tensor: Tensor, *, posted_s: float | None = None) -> None:
        """Begin to send a tensor, and return at once. The tensor must not be changed until the
        other stage has it. Numbers count from 0. `posted_s`: when it was posted, by
        `time.monotonic`; None: now. Raises `LinkLost` once the link is lost."""
        ...

    def times(self) -> list[SendTimes]:
        """Return the records of messages that came through since the last call."""
        ...

    def close(self) -> None:
        """End threads and connections; what has not arrived is dropped. Idempotent."""
        ...


class Receiver(Protocol):
    """The receiving end of a link, which calls `on_arrival` for each message."""

    def times(self) -> list[ArrivalTimes]:
        """Return the records of messages that arrived since the last call."""
        ...

    def close(self) -> None:
        """End threads and connections; `on_arrival` is not called any more. Idempotent."""
        ...


class Loss:
    """State of a link's end: whether it is closed or lost. Either happens only once."""

    def __init__(self, on_lost: OnLost) -> None:
        self.over = threading.Event()
        """Set once the link is closed or lost and carries nothing more."""
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
    """Empty a queue that another thread may be adding to, and return its items."""
    return [times.popleft() for _ in range(len(times))]
