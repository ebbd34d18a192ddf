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
        """The memory with the copy (one at most), by the trainer's buffer's host, path, inode."""
        self._port: WeightPort | None = None
        self._arriving: Arriving | None = None
        self._newest = 0
        """Number of the newest version sent between hosts that this host was told of."""
        self._lock = threading.Lock()

    def copy(self, source: BufferLayout) -> BufferLayout:
        """Return a layout with this host's memory for a copy of the buffer. The memory is made at
        the first call and serves all versions. If `source` has no memory (`BufferLayout.of`), a
        trainer on this host writes it. Raises `ValueError` if there is no room."""
        key = source.host, source.path, source.inode
        if key not in self._copies:
            self._copies.clear()  # one trainer, one buffer: those before are gone
            self._copies[key] = source.memory()
        return source.at(self._copies[key])

    def read(self, layout: BufferLayout, start: int, size: int) -> bytes:
        """Return `size` bytes of a buffer on this host. Raises `OSError` if the buffer is gone."""
        return read(layout, start, size)

    def port(self, address: str) -> PortAddress:
        """Return the port at which other hosts can ask for weights, after opening it on `address`
        if need be. Raises `OSError`."""
        with self._lock:
            if self._port is None:
                self._port = WeightPort(address)
            return self._port.address

    def send(self, number: int, layout: BufferLayout, head: bytes) -> None:
        """Offer other hosts the version that the trainer has written here, as shipment `number`.
        `head`: the first bytes of its buffer, which tell versions apart."""
        with self._lock:
            self._check_newest(number)
            assert self._port is not None
            self._port.stream(number, Written(layout, head))

    def take(self, shipment: Shipment, own: int) -> BufferLayout:
        """Receive this version here, as receiving host number `own`, and pass it on to others.
        Returns the layout of its memory once it is complete. Raises what `Arriving.wait` does, and
        `ValueError` if there is no room."""
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
        """Raise `OSError` for a late call, about an earlier sending of weights than the newest."""
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
