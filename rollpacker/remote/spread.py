"""Brings the trainer's weights to other hosts, each version once to each.

They are read in buckets where they lie, on the run's host or another, and written there in the same
order, some buckets ahead of what has arrived. A bucket that several hosts take at about the same
time is read once.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollpacker.remote.copies import Read
from rollpacker.weight_buffer import ALIGNMENT, BufferLayout, StaleWeightsError, WeightSource

BUCKET_BYTES = 4 << 20
AHEAD = 4
"""Buckets of one host that are under way at a time."""
KEPT = 16
"""Buckets that are kept for other hosts."""


class Call(Protocol):
    """Has an agent do something, and waits for it."""

    def __call__(self, method: str, *arguments: Any) -> Any: ...


@dataclass(slots=True)
class _Place:
    """What one host has: whose, and where it lies there."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    source: WeightSource | None = None
    head: bytes = b""
    there: WeightSource | None = None


class Spread:
    """Of one run."""

    def __init__(self, read: Read, put: Callable[[bytes], Any]) -> None:
        """`read`: bytes of the trainer's buffer, wherever it is. `put`: has them sent, as often as
        it is named, to whoever is called with what it returns."""
        self._read, self._put = read, put
        self._lock = threading.Lock()
        self._version: tuple[WeightSource, bytes] | None = None
        self._buckets: OrderedDict[int, Any] = OrderedDict()
        self._at: weakref.WeakKeyDictionary[Any, _Place] = weakref.WeakKeyDictionary()
        """What each host has."""

    def bring(self, source: WeightSource, host: object, call: Call) -> WeightSource:
        """Where that host has this version; one that asks while it is on its way waits. Raises what
        `call` raises, `OSError` and `StaleWeightsError`."""
        with self._lock:
            place = self._at.setdefault(host, _Place())
        with place.lock:
            try:
                head = self._read(source.layout, 0, ALIGNMENT)
            except OSError:  # the trainer's host is lost: what was brought before is still whole
                if place.there is None or place.source != source:
                    raise
                return place.there
            if place.there is None or (place.source, place.head) != (source, head):
                place.there = self._send(source, head, call)
                place.source, place.head = source, head
            return place.there

    def _send(self, source: WeightSource, head: bytes, call: Call) -> WeightSource:
        layout = source.layout
        size = layout.size_bytes
        there: BufferLayout = call("copy", layout)
        call("write", layout, 0, head)
        starts = iter(range(ALIGNMENT, size - ALIGNMENT, BUCKET_BYTES))
        errors: list[Exception] = []

        def send() -> None:
            try:
                while not errors:
                    with self._lock:
                        start = next(starts, None)
                    if start is None:
                        return
                    call("write", layout, start, self._bucket(source, head, start))
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=send, daemon=True) for _ in range(AHEAD)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        if self._read(layout, 0, ALIGNMENT) != head:
            raise StaleWeightsError(f"the weights of version {source.version} changed on their way")
        call("write", layout, size - ALIGNMENT, self._read(layout, size - ALIGNMENT, ALIGNMENT))
        return WeightSource(version=source.version, layout=there)

    def _bucket(self, source: WeightSource, head: bytes, start: int) -> Any:
        with self._lock:
            if self._version != (source, head):
                self._version = source, head
                self._buckets.clear()
            if start not in self._buckets:
                end = min(start + BUCKET_BYTES, source.layout.size_bytes - ALIGNMENT)
                data = self._read(source.layout, start, end - start)
                self._buckets[start] = self._put(data)
                while len(self._buckets) > KEPT:
                    self._buckets.popitem(last=False)
            return self._buckets[start]
