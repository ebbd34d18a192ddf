"""Receives a version of the weights that goes to several hosts at once, and passes it on.

    trainer's host --shard 0--> host 0 --> hosts 1, 2
                   --shard 1--> host 1 --> hosts 2, 0
                   --shard 2--> host 2 --> hosts 0, 1

A shard is a range of bytes. It leaves the trainer's hosts once, to one receiving host, which passes
it on as it comes in. For each shard the receiving hosts have an order: if the first is lost, the
others ask the second, which gets the rest from the trainer's host, and so on. As a host waits only
for hosts before it in that order, none wait in a circle.
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
"""Number of new bytes after which threads that wait to send a version on to others look again."""
RETRY_S = 0.5
"""Seconds before a host of the trainer that did not answer is asked again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipment:
    """One version of the weights on its way from the trainer's hosts to several others."""

    number: int
    """Number of this sending of weights to hosts, from 1 up in a run; later ones replace it."""
    layout: BufferLayout
    """File, size and places of tensors of the trainer's buffer on the host `sources[0]`."""
    head: bytes
    """First bytes of the trainer's buffer, which tell one written version from another."""
    sources: tuple[PortAddress, ...]
    """Addresses of the hosts on which the trainer has written the version."""
    takers: tuple[PortAddress, ...]
    """Addresses of the hosts that are to receive the version."""
    patience_s: float
    """Seconds without a new byte of a shard after which its transfer fails."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard: the bytes of the weights' buffer from `start` to before `end`."""

    start: int
    end: int
    source: PortAddress
    """Address of the trainer's host that sends the shard."""
    first: int
    """Index in `takers` of the host to which `source` sends the shard; others get it from that."""


def shards_of(shipment: Shipment) -> list[Shard]:
    """Return the shards (ranges of bytes) of a shipment, in order: one for each pair of a source
    and a receiving host, so that all sources send to all hosts at once."""
    num_sources, num_takers = len(shipment.sources), len(shipment.takers)
    count = num_sources * num_takers
    begin, size = ALIGNMENT, shipment.layout.size_bytes - 2 * ALIGNMENT
    ends = [begin + size * number // count for number in range(count + 1)]
    return [
        Shard(ends[n], ends[n + 1], shipment.sources[n // num_takers], n % num_takers)
        for n in range(count)
    ]


class Arriving:
    """One version of the weights that arrives on a host, which passes it on meanwhile."""

    def __init__(self, shipment: Shipment, own: int, there: BufferLayout) -> None:
        """`own`: this host's index in `takers`. `there`: its memory for the version."""
        self.shipment = shipment
        self._own, self._there = own, there
        self._shards = shards_of(shipment)
        self._ends = [shard.start for shard in self._shards]
        """For each shard, the end of the bytes that have arrived, as a position in the buffer."""
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="weights arrive", daemon=True)

    def begin(self) -> None:
        """Begin to receive the version, in a thread of its own."""
        self._thread.start()

    def wait(self) -> None:
        """Wait until the version is complete here. Raises `OSError` if a part does not come, and
        `StaleWeightsError` if the trainer has begun to write the next version."""
        self._thread.join()
        self._check()

    def give_up(self) -> None:
        """Stop receiving the version. After that nothing is written into its memory any more."""
        self._fail(OSError("it was given up"))
        self._thread.join()

    # -- for the hosts after this one --------------------------------------------------------------

    def open(self) -> IO[bytes]:
        """Open the memory in which the version arrives, as a file for reading."""
        return opened(self._there)

    def arrived(self, start: int, end: int, within_s: float) -> int:
        """Wait up to `within_s` seconds for bytes from position `start` on. Returns the position up
        to which they are here, at most `end`."""
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
        """Receive shard `number` into `whole`, this host's memory: from the hosts before this one
        in the shard's order, else from the trainer's host."""
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
        """Return the hosts before this one in the order in which hosts receive the shard."""
        takers = self.shipment.takers
        place = (self._own - shard.first) % len(takers)
        return [takers[(shard.first + n) % len(takers)] for n in range(place)]

    def _take(self, address: PortAddress, number: int, whole: memoryview) -> None:
        """Receive what is still missing of shard `number` from the host at this address."""
        start, end = self._ends[number], self._shards[number].end
        took = partial(self._took, number, start)
        if start < end:
            take(address, self.shipment.number, whole[start:end], start, took)

    def _patiently(self, take: Callable[[], None], progress: Callable[[], int]) -> None:
        """Receive bytes with `take` from a host of the trainer. After an `OSError` this is
        repeated, until `progress` (position reached) has not grown for `patience_s` seconds."""
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
        """Raise the error that has ended the transfer, if any. The argument is ignored."""
        if isinstance(self._error, StaleWeightsError):
            raise StaleWeightsError("the weights changed on their way") from self._error
        if self._error is not None:
            raise OSError(str(self._error) or repr(self._error)) from self._error

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
