"""A version of the weights on its way to several hosts at once.

    the trainer's hosts          hosts that take it
        a  --shard 0--> 0 --+--> 1, 2
           --shard 1--> 1 --+--> 0, 2      each shard crosses from pool to pool once,
           --shard 2--> 2 --+--> 0, 1      and is passed on as it comes in

Where a host is lost, those that waited for its shards ask the next one after it, which gets what it
lacks from the trainer. So each waits only for hosts before it in the order of that shard, and
nobody in a circle.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import IO

from rollpacker.weights.between_hosts.port import PortAddress, take
from rollpacker.weights.buffer import ALIGNMENT, BufferLayout, StaleWeightsError, opened
from rollpacker.workers.loop import at_once

PASS_ON_BYTES = 256 << 10
"""Hosts that wait for a shard are woken each time that so many bytes more of it are here."""
RETRY_S = 0.5
"""Seconds before the trainer's host is asked again that did not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipment:
    """A version on its way, as each host that takes part is told of it."""

    number: int
    """One more with each shipment of a run."""
    layout: BufferLayout
    """The trainer's buffer. If it has written several that are alike, the first of them."""
    head: bytes
    """The first bytes of that buffer."""
    sources: tuple[PortAddress, ...]
    """Ports of the hosts where the trainer has written."""
    takers: tuple[PortAddress, ...]
    """Ports of the hosts that take the version."""
    patience_s: float
    """If nothing of a shard has come for so many seconds, it is given up."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A range of bytes of the buffer, from `start` to before `end`."""

    start: int
    end: int
    source: PortAddress
    """The host of the trainer that gives it."""
    first: int
    """Number of the taker that gets it straight from there."""


def shards_of(shipment: Shipment) -> list[Shard]:
    """The shards of a shipment: for each taker as many as there are sources, so that it takes from
    all of them at once."""
    num_sources, num_takers = len(shipment.sources), len(shipment.takers)
    count = num_sources * num_takers
    begin, size = ALIGNMENT, shipment.layout.size_bytes - 2 * ALIGNMENT
    ends = [begin + size * number // count for number in range(count + 1)]
    return [
        Shard(ends[n], ends[n + 1], shipment.sources[n // num_takers], n % num_takers)
        for n in range(count)
    ]


class Arriving:
    """One shipment on a host that takes it. It meets `Streamed`, since it is passed on."""

    def __init__(self, shipment: Shipment, own: int, there: BufferLayout) -> None:
        """`own` is this host's number among the takers, `there` the memory where the version
        goes."""
        self.shipment = shipment
        self._own, self._there = own, there
        self._shards = shards_of(shipment)
        self._ends = [shard.start for shard in self._shards]
        """For each shard, up to which byte it is here."""
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="weights arrive", daemon=True)

    def begin(self) -> None:
        """Begin to take it, in a thread of its own."""
        self._thread.start()

    def wait(self) -> None:
        """Wait until it is whole. Raises `OSError` if a shard does not come, `StaleWeightsError` if
        the trainer has begun to write the next version."""
        self._thread.join()
        self._check()

    def give_up(self) -> None:
        """Stop taking it. Nothing is written any more once this returns."""
        self._fail(OSError("it was given up"))
        self._thread.join()

    # -- for the hosts after this one --------------------------------------------------------------

    def open(self) -> IO[bytes]:
        """See `Streamed`."""
        return opened(self._there)

    def arrived(self, start: int, end: int, within_s: float) -> int:
        """See `Streamed`."""
        number = next(n for n, shard in enumerate(self._shards) if start < shard.end)
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._ends[number] > start, within_s)
            self._check()
            return max(start, min(end, self._ends[number]))

    # -- from the hosts before it ------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with opened(self._there, os.O_RDWR) as file:
                whole = memoryview(mmap.mmap(file.fileno(), self._there.size_bytes))
            whole[:ALIGNMENT] = self.shipment.head
            at_once([partial(self._bring, n, whole) for n in range(len(self._shards))])
            self._check()
            number, behind, start = self.shipment.number, bytearray(ALIGNMENT), len(whole)
            # A source gives these only if it still holds what it held when the first byte left.
            for source in reversed(self.shipment.sources):
                into = memoryview(behind)
                last = partial(take, source, number, into, start - ALIGNMENT, self._check)
                self._patiently(last, lambda: 0)
            assert self._ends == [shard.end for shard in self._shards]
            whole[-ALIGNMENT:] = behind
        except Exception as error:  # for `wait`
            self._fail(error)

    def _bring(self, number: int, whole: memoryview) -> None:
        """Take one shard, from the first host that gives it."""
        shard = self._shards[number]
        try:
            for address in self._takers_before(shard):
                with contextlib.suppress(OSError):
                    return self._take(address, number, whole)
                self._check()
            from_source = partial(self._take, shard.source, number, whole)
            self._patiently(from_source, lambda: self._ends[number])
        except Exception as error:  # for `wait`
            self._fail(error)

    def _takers_before(self, shard: Shard) -> list[PortAddress]:
        """The hosts that have the shard before this one has it, the first of them first."""
        takers = self.shipment.takers
        place = (self._own - shard.first) % len(takers)
        return [takers[(shard.first + n) % len(takers)] for n in range(place)]

    def _take(self, address: PortAddress, number: int, whole: memoryview) -> None:
        """Take what is still missing of a shard."""
        start, end = self._ends[number], self._shards[number].end
        took = partial(self._took, number, start)
        if start < end:
            take(address, self.shipment.number, whole[start:end], start, took)

    def _patiently(self, take: Callable[[], None], progress: Callable[[], int]) -> None:
        """Take from the trainer's host, again where that was cut off meanwhile, until there was no
        progress for too long."""
        before, since_s = progress(), time.monotonic()
        while True:
            try:
                return take()
            except OSError:
                self._check()
                if progress() > before:
                    before, since_s = progress(), time.monotonic()
                if time.monotonic() - since_s > self.shipment.patience_s:
                    raise
            time.sleep(RETRY_S)

    def _took(self, number: int, start: int, count: int) -> None:
        with self._changed:
            self._check()
            before, end = self._ends[number], max(self._ends[number], start + count)
            self._ends[number] = end
            # Not for every packet: each time all that wait wake up.
            if before // PASS_ON_BYTES < end // PASS_ON_BYTES or end == self._shards[number].end:
                self._changed.notify_all()

    def _check(self, _: int = 0) -> None:
        """Raise the error that has ended this, if there was one."""
        if isinstance(self._error, StaleWeightsError):
            raise StaleWeightsError("the weights changed on their way") from self._error
        if self._error is not None:
            raise OSError(str(self._error) or repr(self._error)) from self._error

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
