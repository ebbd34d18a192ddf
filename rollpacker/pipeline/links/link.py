"""The contract of a link's two ends. A link is one direction over one border between two stages.

Messages are numbered from 0 in the order in which they are sent. Each arrives once, in that order,
bit for bit. A link that cannot keep this up is *lost*: it says so once, and carries nothing more.
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
"""Gets each message's number and tensor, in order, in a thread of the link. It must not raise, and
should only put the tensor somewhere: while it runs, nothing else arrives."""
MAX_TIMES = 4096
"""So many records of messages are kept for whoever asks; older ones are dropped."""


class LinkLost(TrainerProcessError):
    """A link carries nothing more. The run can be resumed."""


OnLost = Callable[[LinkLost], None]
"""Called once, in a thread of the link, when it is lost and was not closed at this end. It must not
close the link, since it runs in one of its threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Border:
    """Names one direction between two stages, for messages to people."""

    stages: tuple[int, int]
    """The sending stage and the receiving stage."""
    peer: int
    """The rank at the other end."""

    def __str__(self) -> str:
        return f"the link from stage {self.stages[0]} to stage {self.stages[1]}"

    def lost(self, why: str, address: str) -> LinkLost:
        """The error of a lost link. `address` is where the peer is or should be."""
        return LinkLost(
            f"{self}, with process {self.peer} of the trainer at {address}, is lost: {why}. No "
            "update of this step was kept; --resume goes on from the last checkpoint"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SendTimes:
    """Times of one message, by the sender's clock (`time.monotonic`)."""

    number: int
    num_bytes: int
    posted_s: float
    """The time at which `send` was called."""
    started_s: float
    """The time at which the first byte was handed on. If the message was sent again, this is the
    last time."""
    acknowledged_s: float
    """The sender knew that it had arrived. A direct link knows only that it has left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalTimes:
    """Times of one message. The clocks are those of two processes, perhaps of two hosts: their
    difference is in `seconds`, and cancels in a message there and one back."""

    number: int
    num_bytes: int
    posted_s: float
    """The time at which `send` was called, by the sender's clock."""
    arrived_s: float
    """The time at which all of it was received, by the receiver's clock."""

    @property
    def seconds(self) -> float:
        """Seconds from posting to arrival."""
        return self.arrived_s - self.posted_s


class Sender(Protocol):
    """The sending end."""

    def send(self, number: int, tensor: Tensor, *, posted_s: float | None = None) -> None:
        """Return at once and send meanwhile. The tensor must not be changed until the other stage
        has it. Numbers count from 0. `posted_s`: by `time.monotonic`, if that was before now.
        Raises `LinkLost` once the link is lost."""
        ...

    def times(self) -> list[SendTimes]:
        """Take the records of messages that came through since the last call."""
        ...

    def close(self) -> None:
        """End its threads and connections; what has not arrived is dropped. Idempotent."""
        ...


class Receiver(Protocol):
    """The receiving end. It calls `on_arrival`."""

    def times(self) -> list[ArrivalTimes]:
        """Take the records of messages that arrived since the last call."""
        ...

    def close(self) -> None:
        """End its threads and connections; `on_arrival` is not called any more. Idempotent."""
        ...


class Loss:
    """State of a link's end: whether it is closed or lost, which it becomes only once."""

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
        """Close the end. Returns whether it was neither closed nor lost before."""
        with self._lock:
            was_open = not self.over.is_set()
            self.over.set()
            return was_open

    def check(self) -> None:
        """Raise `LinkLost` if the link is lost."""
        if self.error is not None:
            raise self.error


def taken(times: deque[_Times]) -> list[_Times]:
    """Empty a queue that another thread may be adding to."""
    return [times.popleft() for _ in range(len(times))]
