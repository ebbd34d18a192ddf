"""Brings the trainer's weights to other hosts, each version once to each.

    publish     to several at once, before anybody asks: each shard leaves the trainer's host once,
                straight to one of them, which passes it on (`arriving.py`)
    bring       to a host whose engine asks, if it has not been published to it: by agents' calls

To bring them, they are read in buckets where they lie, on the run's host or another, and written
there in the same order, some buckets ahead of what has arrived. A bucket that several hosts take at
about the same time is read once.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from rollpacker.weights.between_hosts.arriving import Shipment
from rollpacker.weights.between_hosts.copies import Read
from rollpacker.weights.between_hosts.port import PortAddress
from rollpacker.weights.buffer import ALIGNMENT, BufferLayout, StaleWeightsError, WeightSource

Result = TypeVar("Result")
BUCKET_BYTES = 4 << 20
AHEAD = 4
"""Buckets of one host that are under way at a time."""
KEPT = 16
"""Buckets that are kept for other hosts."""
PATIENCE_S = 20.0
"""A shard of which nothing has come from the trainer's host for so long comes no more."""
PORT_S = 10.0
"""A host that has not said for so long where others can ask it takes no part."""


class Call(Protocol):
    """Has an agent do something, and waits for it."""

    def __call__(self, method: str, *arguments: Any) -> Any: ...


class Member(Protocol):
    """A host, as far as weights go there or come from there."""

    name: str
    address: str
    """Where other hosts reach it."""

    def agent(self) -> tuple[object, Call]:
        """What stands for the agent that it has now, and that one's calls, which raise
        `OSError`; as this does if it has none."""
        ...


@dataclass(frozen=True, slots=True)
class _Taker:
    """A host that a version is published to."""

    name: str
    agent: object
    call: Call
    port: PortAddress


@dataclass(slots=True)
class _Place:
    """What one host has: whose, and where it lies there."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    source: WeightSource | None = None
    head: bytes = b""
    there: WeightSource | None = None

    def has(self, source: WeightSource, head: bytes) -> bool:
        return self.there is not None and (self.source, self.head) == (source, head)


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
        self._members: dict[str, Member] = {}
        self._publishing = threading.Lock()
        self._num_shipments = 0

    def add(self, name: str, member: Member) -> None:
        """A host by the name that layouts give it."""
        self._members[name] = member

    def publish(
        self, sources: Sequence[WeightSource], hosts: Sequence[Member]
    ) -> dict[str, Exception]:
        """Bring a version to all of these hosts at once, before their engines ask for it.

        `sources`: where the trainer has written it, the same bytes on each of its hosts. Returns by
        name why a host does not have it, which `bring` tries again. Raises `OSError` if the
        trainer's hosts cannot be asked, `StaleWeightsError` if the weights changed meanwhile.
        """
        with self._publishing:
            first = sources[0]
            head = self._read(first.layout, 0, ALIGNMENT)
            self._num_shipments += 1
            number = self._num_shipments
            writers = [self._members[source.layout.host] for source in sources]
            shipment = Shipment(
                number=number,
                layout=first.layout,
                head=head,
                sources=tuple(
                    self._offer(number, writer, source)
                    for writer, source in zip(writers, sources, strict=True)
                ),
                takers=(),
                patience_s=PATIENCE_S,
            )
            return self._ship(shipment, first, [host for host in hosts if host not in writers])

    def _ship(
        self, shipment: Shipment, source: WeightSource, hosts: Sequence[Member]
    ) -> dict[str, Exception]:
        """See `publish`."""
        failed, takers = {}, []
        reached = _each([partial(_reach, host) for host in hosts], PORT_S)
        for host, taker in zip(hosts, reached, strict=True):
            if isinstance(taker, Exception):
                failed[host.name] = taker
            elif not self._place(taker.agent).has(source, shipment.head):
                takers.append(taker)
        shipment = replace(shipment, takers=tuple(taker.port for taker in takers))
        take = partial(self._take, shipment, source)
        ended = _each([partial(take, own, taker) for own, taker in enumerate(takers)])
        for taker, error in zip(takers, ended, strict=True):
            if isinstance(error, StaleWeightsError):
                raise error
            if isinstance(error, Exception):
                failed[taker.name] = error
        return failed

    def _take(self, shipment: Shipment, source: WeightSource, own: int, taker: _Taker) -> None:
        place = self._place(taker.agent)
        with place.lock:
            place.there = None  # what is there is written over
            layout: BufferLayout = taker.call("take", shipment, own)
            place.there = WeightSource(version=source.version, layout=layout)
            place.source, place.head = source, shipment.head

    def _offer(self, number: int, writer: Member, source: WeightSource) -> PortAddress:
        _, call = writer.agent()
        port: PortAddress = call("port", writer.address)
        call("send", number, source.layout, self._read(source.layout, 0, ALIGNMENT))
        return port

    def _place(self, agent: object) -> _Place:
        with self._lock:
            return self._at.setdefault(agent, _Place())

    def bring(self, source: WeightSource, host: object, call: Call) -> WeightSource:
        """Where that host has this version; one that asks while it is on its way waits. Raises what
        `call` raises, `OSError` and `StaleWeightsError`."""
        place = self._place(host)
        with place.lock:
            try:
                head = self._read(source.layout, 0, ALIGNMENT)
            except OSError:  # the trainer's host is lost: what was brought before is still whole
                if place.there is None or place.source != source:
                    raise
                return place.there
            if place.there is None or not place.has(source, head):
                place.there = None  # what is there is written over
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


def _reach(host: Member) -> _Taker:
    agent, call = host.agent()
    return _Taker(host.name, agent, call, call("port", host.address))


def _each(
    work: Sequence[Callable[[], Result]], within_s: float | None = None
) -> list[Result | Exception]:
    """Do all of this at once. Returns what each returned or raised, `TimeoutError` for what takes
    longer."""
    late = TimeoutError(f"no answer within {within_s} s")
    found: list[Result | Exception] = [late] * len(work)

    def do(number: int) -> None:
        try:
            found[number] = work[number]()
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=do, args=(n,), daemon=True) for n in range(len(work))]
    until = None if within_s is None else time.monotonic() + within_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(None if until is None else max(0.0, until - time.monotonic()))
    return list(found)
