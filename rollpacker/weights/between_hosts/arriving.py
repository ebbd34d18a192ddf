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

from rollpacker.weights.between_hosts.copies import opened
from rollpacker.weights.between_hosts.port import PortAddress, take
from rollpacker.weights.buffer import ALIGNMENT, BufferLayout, StaleWeightsError

PASS_ON_BYTES = 256 << 10
"""Others are told after so many."""
RETRY_S = 0.5
"""Before the trainer's host is asked again that did not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipment:
    """What each host that takes part is told."""

    number: int
    """One more with each."""
    layout: BufferLayout
    """Of the trainer's buffer; of the first, if it has written several that are alike."""
    head: bytes
    """The first bytes of that."""
    sources: tuple[PortAddress, ...]
    """Of the hosts where the trainer has written."""
    takers: tuple[PortAddress, ...]
    patience_s: float
    """A shard of which nothing has come for so long comes no more."""


@dataclass(frozen=True, slots=True)
class Shard:
    start: int
    end: int
    source: PortAddress
    first: int
    """The taker that has it from the source."""


def shards_of(shipment: Shipment) -> list[Shard]:
    """As many for each taker as there are sources: it takes from all of them at once."""
    num_sources, num_takers = len(shipment.sources), len(shipment.takers)
    count = num_sources * num_takers
    begin, size = ALIGNMENT, shipment.layout.size_bytes - 2 * ALIGNMENT
    ends = [begin + size * number // count for number in range(count + 1)]
    return [
        Shard(ends[n], ends[n + 1], shipment.sources[n // num_takers], n % num_takers)
        for n in range(count)
    ]


class Arriving:
    """One shipment on a host that takes it; meets `Streamed`, since it is passed on."""

    def __init__(self, shipment: Shipment, own: int, there: BufferLayout) -> None:
        """`own`: which of the takers this host is. `there`: where it goes."""
        self.shipment = shipment
        self._own, self._there = own, there
        self._shards = shards_of(shipment)
        self._ends = [shard.start for shard in self._shards]
        """Up to where each shard is there."""
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="weights arrive", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def wait(self) -> None:
        """Until it is whole. Raises `OSError` if a shard does not come, `StaleWeightsError` if the
        trainer has begun to write the next version."""
        self._thread.join()
        with self._changed:
            self._check()

    def give_up(self) -> None:
        """Nothing is written any more once this returns."""
        self._fail(OSError("it was given up"))
        self._thread.join()

    # -- for the hosts after this one --------------------------------------------------------------

    def open(self) -> IO[bytes]:
        return opened(self._there)

    def arrived(self, start: int, end: int, within_s: float) -> int:
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
            threads = [
                threading.Thread(target=self._bring, args=(number, whole), daemon=True)
                for number, shard in enumerate(self._shards)
                if shard.start < shard.end
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self._go_on()
            behind = bytearray(ALIGNMENT)
            # A source gives these only if it still holds what it held when the first byte left.
            for source in reversed(self.shipment.sources):
                self._from_source(source, memoryview(behind), len(whole) - ALIGNMENT, self._go_on)
            assert self._ends == [shard.end for shard in self._shards]
            whole[-ALIGNMENT:] = behind
        except Exception as error:  # for `wait`
            self._fail(error)

    def _bring(self, number: int, whole: memoryview) -> None:
        shard = self._shards[number]
        try:
            for address in self._takers_before(shard):
                start = self._ends[number]
                with contextlib.suppress(OSError):
                    into, took = whole[start : shard.end], partial(self._took, number, start)
                    take(address, self.shipment.number, into, start, took)
                    return
                self._go_on()
            start = self._ends[number]
            into, took = whole[start : shard.end], partial(self._took, number, start)
            self._from_source(shard.source, into, start, took)
        except Exception as error:  # for `wait`
            self._fail(error)

    def _takers_before(self, shard: Shard) -> list[PortAddress]:
        """Those that have the shard before this host has it, the first of them first."""
        takers = self.shipment.takers
        place = (self._own - shard.first) % len(takers)
        return [takers[(shard.first + n) % len(takers)] for n in range(place)]

    def _from_source(
        self, source: PortAddress, into: memoryview, start: int, took: Callable[[int], None]
    ) -> None:
        """Take it from the trainer's host, again where that was cut off meanwhile."""
        num_taken, taken_s = 0, time.monotonic()
        while True:
            num_before = num_taken

            def takes(count: int, before: int = num_before) -> None:
                nonlocal num_taken
                num_taken = before + count
                took(num_taken)

            try:
                take(source, self.shipment.number, into[num_taken:], start + num_taken, takes)
                return
            except OSError:
                self._go_on()
                if num_taken > num_before:
                    taken_s = time.monotonic()
                if time.monotonic() - taken_s > self.shipment.patience_s:
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

    def _go_on(self, _: int = 0) -> None:
        with self._changed:
            self._check()

    def _check(self) -> None:
        if isinstance(self._error, StaleWeightsError):
            raise StaleWeightsError("the weights changed on their way") from self._error
        if self._error is not None:
            raise OSError(str(self._error) or repr(self._error)) from self._error

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
