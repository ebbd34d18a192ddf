"""Direct links between pipeline stages: `isend` and `irecv` of torch.distributed, over a process
group for each direction. A header goes before each tensor, so that shapes may differ.

One lost connection loses the link. Direct links send CPU tensors alone, over gloo. With NCCL a
receiver's wait would be queued on the CUDA stream that computes, ahead of the work that its sender
waits for. So on CUDA all links go through host memory.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rollpacker.pipeline.links.link import (
    MAX_TIMES,
    ArrivalTimes,
    Border,
    Loss,
    OnArrival,
    OnLost,
    SendTimes,
    taken,
)
from rollpacker.pipeline.links.wire import (
    BYE,
    HEADER,
    fits,
    packed_bye,
    packed_header,
    read_header,
)

IDLE = timedelta(days=365)
"""Timeout of a link's process group: a receiver waits for the next message however long the
rollouts between two steps take. If the sender's process ends, the receiver notices at once."""
END_S = 5.0
"""Seconds that a closed receiver waits for its sender to be closed. gloo cannot be told to stop
waiting: after this the receiver's thread stays until its process or the sender's ends."""


def direct_group(ranks: tuple[int, int]) -> dist.ProcessGroup:
    """Make the process group for messages from the first to the second of two ranks. All ranks of
    the job make all such groups, in the same order."""
    return dist.new_group(list(ranks), timeout=IDLE, backend="gloo")  # type: ignore[no-any-return]


class _Sent(NamedTuple):
    """A message that is being sent, or the sender's goodbye (`number` is -1)."""

    works: list[dist.Work]
    tensors: list[Tensor]
    """The header and the message's tensor, which must be kept until they are sent."""
    number: int
    posted_s: float


class DirectSender:
    """Sends tensors to a neighbouring stage over torch.distributed. Keeps each until it is sent."""

    def __init__(
        self,
        border: Border,
        group: dist.ProcessGroup,
        *,
        on_lost: OnLost,
    ) -> None:
        """Start the sender's thread. `group` is made by `direct_group`, for this sender alone."""
        self._border = border
        self._group = group
        self._loss = Loss(on_lost)
        self._num_posted = 0
        self._sent: queue.SimpleQueue[_Sent | None] = queue.SimpleQueue()
        self._times: deque[SendTimes] = deque(maxlen=MAX_TIMES)
        self._thread = threading.Thread(target=self._run, name=f"sends to {border.peer}")
        self._thread.daemon = True
        self._thread.start()

    def send(self, number: int, tensor: Tensor, *, posted_s: float | None = None) -> None:
        """Begin to send message `number`, counted from 0, and return at once. `posted_s`: the time
        to record for the call; None: now. Raises `LinkLost` on a lost link."""
        assert number == self._num_posted, f"message {number} after {self._num_posted - 1}"
        assert fits(tensor), f"no message holds {tensor.ndim} dimensions of {tensor.dtype}"
        self._loss.check()
        self._num_posted += 1
        posted_s = time.monotonic() if posted_s is None else posted_s
        tensor = tensor.detach().contiguous()
        self._post(packed_header(number, tensor, posted_s), [tensor], number, posted_s)

    def _post(self, header: bytes, tensors: list[Tensor], number: int, posted_s: float) -> None:
        head = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        all_ = [head, *(one for one in tensors if one.nbytes)]
        try:
            works = [dist.isend(one, self._border.peer, group=self._group) for one in all_]
        except RuntimeError as error:
            self._loss.lose(self._border.lost(_first_sentence(error), "its process group"))
            self._loss.check()
            return
        self._sent.put(_Sent([work for work in works if work is not None], all_, number, posted_s))

    def _run(self) -> None:
        """Wait for each message in the queue until it is sent, and release it. None ends this."""
        while (sent := self._sent.get()) is not None:
            started_s = time.monotonic()
            try:
                for work in sent.works:
                    work.wait()
            except RuntimeError as error:
                self._loss.lose(self._border.lost(_first_sentence(error), "its process group"))
                return
            times = SendTimes(
                number=sent.number,
                num_bytes=sum(one.nbytes for one in sent.tensors[1:]),
                posted_s=sent.posted_s,
                started_s=started_s,
                acknowledged_s=time.monotonic(),
            )
            if sent.number >= 0:
                self._times.append(times)

    def times(self) -> list[SendTimes]:
        """Return the times of the messages that were sent since the last call of this method."""
        return taken(self._times)

    def close(self) -> None:
        """End the thread and tell the receiver. Tensors sent before may arrive. Idempotent."""
        if self._loss.close():
            self._post(packed_bye(), [], -1, 0.0)
        self._sent.put(None)
        self._thread.join(END_S)


class DirectReceiver:
    """Receives tensors from a neighbouring stage over torch.distributed, one at a time."""

    def __init__(
        self,
        border: Border,
        group: dist.ProcessGroup,
        *,
        on_arrival: OnArrival,
        on_lost: OnLost,
    ) -> None:
        """Start the receiver's thread. `group`: from `direct_group`, for it alone."""
        self._border = border
        self._group = group
        self._on_arrival = on_arrival
        self._loss = Loss(on_lost)
        self._times: deque[ArrivalTimes] = deque(maxlen=MAX_TIMES)
        self._thread = threading.Thread(target=self._run, name=f"receives from {border.peer}")
        self._thread.daemon = True
        self._thread.start()

    def _run(self) -> None:
        try:
            while self._receive():
                pass
            why = "it was closed there"
        except (RuntimeError, ValueError) as error:
            why = _first_sentence(error)
        self._loss.lose(self._border.lost(why, "its process group"))

    def _receive(self) -> bool:
        """Receive one message. Returns False if it was the sender's goodbye, else True. Raises
        `RuntimeError` if the connection is lost, and `ValueError` for bytes that are no message."""
        head = self._next(torch.empty(HEADER.size, dtype=torch.uint8))
        header = read_header(head.numpy().tobytes(), 1 << 62)
        if header.kind == BYE:
            return False
        tensor = torch.empty(header.shape, dtype=header.dtype)
        if tensor.nbytes:
            self._next(tensor)
        times = ArrivalTimes(
            number=header.number,
            num_bytes=header.num_bytes,
            posted_s=header.posted_s,
            arrived_s=time.monotonic(),
        )
        if not self._loss.over.is_set():
            self._times.append(times)
            self._on_arrival(header.number, tensor)
        return True

    def _next(self, into: Tensor) -> Tensor:
        work = dist.irecv(into, self._border.peer, group=self._group)
        assert work is not None, "this process is not of the group"
        work.wait()
        return into

    def times(self) -> list[ArrivalTimes]:
        """Return the times of the messages that arrived since the last call of this method."""
        return taken(self._times)

    def close(self) -> None:
        """Stop calling `on_arrival`, and wait at most `END_S` for the sender to be closed."""
        self._loss.close()
        self._thread.join(END_S)


def _first_sentence(error: Exception) -> str:
    return (str(error).splitlines() or [repr(error)])[0].partition(". ")[0]
