"""Keeps the trainer's weights in the memory of one host, and sends them from there to other hosts.

A copy has the same bytes as the trainer's buffer (`weights/buffer.py`). Its first bytes are written
first and its last bytes last, so that readers see by the numbers there whether it is complete.
"""

from __future__ import annotations

import threading

from rollpacker.weights.between_hosts.arriving import Arriving, Shipment
from rollpacker.weights.between_hosts.port import PortAddress, WeightPort, Written
from rollpacker.weights.buffer import BufferLayout, Memory, read


class HostWeights:
    """The weights on one host, and the calls by which the run has them sent to other hosts or
    received from them. Each call may be repeated."""

    def __init__(self) -> None:
        self._copies: dict[tuple[str, str, int], Memory] = {}
        """This host's memory for a copy of the trainer's buffer, one entry at most. The key is the
        host, path and inode of the buffer."""
        self._port: WeightPort | None = None
        self._arriving: Arriving | None = None
        self._newest = 0
        """Highest number of a shipment (sending of a version) that was sent or received here."""
        self._lock = threading.Lock()

    def copy(self, source: BufferLayout) -> BufferLayout:
        """Return a layout of this host's memory for a copy of the buffer `source`, made at the
        first call and used for all versions. A layout without memory yet is filled by a trainer on
        this host. Raises `ValueError` if there is no room."""
        key = source.host, source.path, source.inode
        if key not in self._copies:
            self._copies.clear()  # one trainer, one buffer: those before are gone
            self._copies[key] = source.memory()
        return source.at(self._copies[key])

    def read(self, layout: BufferLayout, start: int, size: int) -> bytes:
        """Return `size` bytes from byte `start` of a buffer here. Raises `OSError` if it is
        gone."""
        return read(layout, start, size)

    def port(self, address: str) -> PortAddress:
        """Return the port at which other hosts ask for weights. The first call opens it on
        `address`. Raises `OSError` if that fails."""
        with self._lock:
            if self._port is None:
                self._port = WeightPort(address)
            return self._port.address

    def send(self, number: int, layout: BufferLayout, head: bytes) -> None:
        """Offer other hosts the version that the trainer has written in the buffer `layout` on this
        host, as shipment `number`. `head`: the buffer's first bytes, which tell versions apart."""
        with self._lock:
            self._check_newest(number)
            assert self._port is not None
            self._port.stream(number, Written(layout, head))

    def take(self, shipment: Shipment, own: int) -> BufferLayout:
        """Receive this version here, as number `own` of the receiving hosts, and pass it on to
        others. Returns its memory's layout once complete. Raises `OSError` or `StaleWeightsError`
        if it does not come (`Arriving.wait`), `ValueError` without room."""
        with self._lock:
            self._check_newest(shipment.number)
            there = self.copy(shipment.layout)
            arriving = self._arriving
            if arriving is None or arriving.shipment.number != shipment.number:
                if arriving is not None:
                    arriving.give_up()
                assert self._port is not None
                self._arriving = arriving = Arriving(shipment, own, there)
                self._port.stream(shipment.number, arriving)
                arriving.begin()
        arriving.wait()
        return there

    def _check_newest(self, number: int) -> None:
        """Raise `OSError` if a shipment with a higher `number` was sent or received already."""
        if number < self._newest:
            raise OSError("the next version is on its way")
        self._newest = number

    def close(self) -> None:
        """Close the port, and stop receiving weights. Further calls do nothing."""
        with self._lock:
            if self._port is not None:
                self._port.close()
            if self._arriving is not None:
                self._arriving.give_up()
