"""A sender made slow on purpose, for tests and emulated runs.

The delays follow the model of `pipeline/plan/virtual_time.py`: a link is latency plus bytes over
rate, and serial in each direction, so that messages queue behind each other's bytes.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from rollpacker.pipeline.links.link import Sender, SendTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """Of each message of one direction."""

    latency_s: float = 0.0
    jitter_s: float = 0.0
    """Standard deviation of the latency, which never falls below zero. Messages do not overtake
    each other."""
    bytes_per_s: float = math.inf


class _Delayed(NamedTuple):
    arrives_s: float
    number: int
    tensor: Tensor
    posted_s: float


class InjectedSender:
    """Meets `Sender` with another one, which gets each message when it would have crossed a link
    with this delay."""

    def __init__(
        self, inner: Sender, delay: Delay, *, seed: int = 0, is_blocking: bool = False
    ) -> None:
        self.delay = delay
        """May be changed at any time: it is looked up when a message is sent."""
        self.is_blocking = is_blocking
        """`send` returns when the message has crossed, as launches behind a slow send of NCCL's do
        (head-of-line blocking). Otherwise messages wait in a thread. May be changed while none
        waits."""
        self._inner = inner
        self._random = random.Random(seed)
        self._free_s = 0.0
        """When the link has taken the bytes of all messages so far."""
        self._arrives_s = 0.0
        """When the last of them arrives."""
        self._changed = threading.Condition()
        self._waiting: deque[_Delayed] = deque()
        self._failure: Exception | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="delays messages", daemon=True)
        self._thread.start()

    def send(self, number: int, tensor: Tensor, *, posted_s: float | None = None) -> None:
        """See `Sender`."""
        posted_s = time.monotonic() if posted_s is None else posted_s
        message = _Delayed(self._crossed(posted_s, tensor.nbytes), number, tensor, posted_s)
        if self.is_blocking:
            time.sleep(max(message.arrives_s - time.monotonic(), 0))
            self._hand_on(message)
            return
        with self._changed:
            if self._failure is not None:
                raise self._failure
            self._waiting.append(message)
            self._changed.notify()

    def _crossed(self, posted_s: float, num_bytes: int) -> float:
        """When a message has crossed."""
        delay = self.delay
        self._free_s = max(self._free_s, posted_s) + num_bytes / delay.bytes_per_s
        latency_s = max(self._random.gauss(delay.latency_s, delay.jitter_s), 0.0)
        self._arrives_s = max(self._arrives_s, self._free_s + latency_s)
        return self._arrives_s

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                if not self._waiting:
                    self._changed.wait()
                elif (left_s := self._waiting[0].arrives_s - time.monotonic()) > 0:
                    self._changed.wait(left_s)
                else:
                    try:
                        self._hand_on(self._waiting.popleft())
                    except Exception as error:  # the next `send` raises it
                        self._failure = error
                        return

    def _hand_on(self, message: _Delayed) -> None:
        self._inner.send(message.number, message.tensor, posted_s=message.posted_s)

    def times(self) -> list[SendTimes]:
        """See `Sender`. The delay lies between `posted_s` and `started_s`."""
        return self._inner.times()

    def close(self) -> None:
        """See `Sender`. Closes the inner one too."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        self._inner.close()
