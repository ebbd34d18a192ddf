"""Brings the trainer's weights to other hosts.

    publish: a version is sent to several hosts at once, before any asks: each range of its bytes
        leaves the trainer's host once, to one of them, which passes it on (`arriving.py`).
    bring: a version is sent to one host whose engine asks for it, unless it is there already.

Both send the version from host to host (`port.py`), one version at a time.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from rollpacker.weights.between_hosts.arriving import Shipment
from rollpacker.weights.between_hosts.host_weights import HostWeights
from rollpacker.weights.between_hosts.port import PortAddress
from rollpacker.weights.buffer import ALIGNMENT, StaleWeightsError, WeightSource
from rollpacker.workers.host import ThisHost
from rollpacker.workers.loop import at_once

PATIENCE_S = 20.0
"""Seconds without a byte from the trainer's host after which a transfer of weights fails."""
PORT_S = 10.0
"""Seconds within which a host must open its port for weights; else it does not get this version."""


class Call(Protocol):
    """Calls a method of a host's agent (the run's process there), and returns its answer."""

    def __call__(self, method: str, *arguments: Any) -> Any: ...


class Member(Protocol):
    """A host that weights are sent from or to."""

    name: str
    address: str
    """The network address at which other hosts reach this one."""

    def agent(self) -> tuple[object, Call]:
        """Return an object that stands for the host's present agent (the run's process there), and
        the function that calls the agent. Both raise `OSError` if the agent is gone."""
        ...


@dataclass(frozen=True, slots=True)
class _Taker:
    """A host that one version of the weights is sent to, and its port for weights."""

    name: str
    agent: object
    call: Call
    port: PortAddress


class _Held(NamedTuple):
    """The version of the weights that one host has received."""

    source: WeightSource
    """The version, and the trainer's buffer in which it was written."""
    head: bytes
    """First bytes of the trainer's buffer at that time, which tell versions apart."""
    there: WeightSource
    """The version, and the memory with it on the host that received it."""

    def of(self, source: WeightSource, head: bytes) -> bool:
        """Whether this is the version in the buffer `source`, whose first bytes are now `head`."""
        return (self.source, self.head) == (source, head)


class Spread:
    """Brings each version of a run's weights to its hosts. Threads may use it at the same time."""

    def __init__(self) -> None:
        self._held: weakref.WeakKeyDictionary[Any, _Held] = weakref.WeakKeyDictionary()
        """For each agent (the run's process on a host), the version that its host has received.
        There is no entry while a version arrives."""
        self._members: dict[str, Member] = {}
        self._shipping = threading.Lock()
        self._num_shipments = 0

    def add(self, name: str, member: Member) -> None:
        """Add a host. `name`: as in `BufferLayout.host`; empty for the run's own host."""
        self._members[name] = member

    def publish(
        self, sources: Sequence[WeightSource], hosts: Sequence[Member]
    ) -> dict[str, Exception]:
        """Send a version to all of these hosts at once, before their engines ask for it.

        `sources`: the buffers that the trainer has written, the same bytes on each of its hosts.
        Returns, by name, the errors of hosts that do not have the version; `bring` tries these
        again. Raises `OSError` if the trainer's hosts cannot be asked, `StaleWeightsError` if the
        weights changed meanwhile.
        """
        failed: dict[str, Exception] = {}
        takers = []
        with self._shipping:
            writers = [self._members[source.layout.host] for source in sources]
            head = self._head(sources[0])
            others = [host for host in hosts if host not in writers]
            reached = at_once([partial(_reach, host) for host in others], PORT_S)
            for host, taker in zip(others, reached, strict=True):
                if isinstance(taker, Exception):
                    failed[host.name] = taker
                elif not self._has(taker.agent, sources[0], head):
                    takers.append(taker)
            ended = self._ship(sources, head, takers) if takers else []
        for taker, error in zip(takers, ended, strict=True):
            if isinstance(error, StaleWeightsError):
                raise error
            if isinstance(error, Exception):
                failed[taker.name] = error
        return failed

    def bring(self, source: WeightSource, agent: object, call: Call, address: str) -> WeightSource:
        """Return the version in the memory of one host, sent there if need be. `agent` stands for
        that host, `call` calls its agent, and other hosts reach it at `address`. Raises what `call`
        raises, `OSError`, and `StaleWeightsError` if newer weights are being written."""
        if (found := self._found(source, agent)) is not None:
            return found
        port = call("port", address)  # waits for a host that cannot be reached yet
        with self._shipping:
            if (found := self._found(source, agent)) is not None:
                return found
            taker = _Taker(address, agent, call, port)
            (ended,) = self._ship([source], self._head(source), [taker])
        if isinstance(ended, Exception):
            raise ended
        return ended

    def _found(self, source: WeightSource, agent: object) -> WeightSource | None:
        """Return this version in the memory of the agent's host, or None if it is not there."""
        try:
            head = self._head(source)
        except OSError:  # the trainer's host is lost: what was brought before is still whole
            held = self._held.get(agent)
            if held is None or held.source != source:
                raise
            return held.there
        held = self._held.get(agent)  # not earlier: it may have come while the trainer was asked
        return held.there if held is not None and held.of(source, head) else None

    def _has(self, agent: object, source: WeightSource, head: bytes) -> bool:
        held = self._held.get(agent)
        return held is not None and held.of(source, head)

    def _head(self, source: WeightSource) -> bytes:
        """Return the first bytes of the trainer's buffer. Raises `OSError` if its host is lost."""
        _, call = self._members[source.layout.host].agent()
        head: bytes = call("read", source.layout, 0, ALIGNMENT)
        return head

    def _ship(
        self, sources: Sequence[WeightSource], head: bytes, takers: Sequence[_Taker]
    ) -> list[WeightSource | Exception]:
        """Send a version to all `takers` at once. `head`: first bytes of its buffer. Returns for
        each taker the version in its memory, or the error."""
        self._num_shipments += 1
        shipment = Shipment(
            number=self._num_shipments,
            layout=sources[0].layout,
            head=head,
            sources=tuple(map(self._offer, sources)),
            takers=tuple(taker.port for taker in takers),
            patience_s=PATIENCE_S,
        )
        take = partial(self._take, shipment, sources[0])
        return at_once([partial(take, own, taker) for own, taker in enumerate(takers)])

    def _offer(self, source: WeightSource) -> PortAddress:
        """Have the trainer's host send the version to hosts that ask for it. Returns its port."""
        writer = self._members[source.layout.host]
        _, call = writer.agent()
        port: PortAddress = call("port", writer.address)
        call("send", self._num_shipments, source.layout, self._head(source))
        return port

    def _take(
        self, shipment: Shipment, source: WeightSource, own: int, taker: _Taker
    ) -> WeightSource:
        self._held.pop(taker.agent, None)  # what is there is written over
        layout = taker.call("take", shipment, own)
        there = WeightSource(version=source.version, layout=layout)
        self._held[taker.agent] = _Held(source, shipment.head, there)
        return there


def _reach(host: Member) -> _Taker:
    agent, call = host.agent()
    return _Taker(host.name, agent, call, call("port", host.address))


class OwnHost(ThisHost):
    """The host of the run's own process, if trainer or engines may be on other hosts. Processes are
    started on it (`Host`), and weights brought to and from it (`Member`)."""

    def __init__(
        self, spread: Spread, *, address: str = "127.0.0.1", gpus: Sequence[str] = ()
    ) -> None:
        """`address`: the network address at which other hosts reach this one. `gpus`: as in
        `ThisHost`."""
        self.address = address
        self.gpus = gpus
        self._spread = spread
        self._weights = HostWeights()
        spread.add("", self)

    def weights(self, source: WeightSource) -> WeightSource:
        """Return where processes of this host can read this version, after bringing it here."""
        if not source.layout.host:
            return source
        return self._spread.bring(source, self, self._do, self.address)

    def agent(self) -> tuple[object, Call]:
        """Return this object as the agent, and the function that calls this host's
        `HostWeights`."""
        return self, self._do

    def close(self) -> None:
        """Close the port at which other hosts take weights, if there is one."""
        self._weights.close()

    def _do(self, method: str, *arguments: Any) -> Any:
        """Call a method of this host's `HostWeights`, as an agent on another host does."""
        return getattr(self._weights, method)(*arguments)
