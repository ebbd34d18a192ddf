"""Keeps the trainer's weights on one host, in the memory that they are written or copied to, and
has them sent from there to other hosts.

A copy is a buffer of the same bytes (`weights/buffer.py`), so that its readers see by the same
numbers whether it is complete. Its first bytes are written first and its last bytes last.
"""

from __future__ import annotations

import threading

from rollpacker.weights.between_hosts.arriving import Arriving, Shipment
from rollpacker.weights.between_hosts.port import PortAddress, WeightPort, Written
from rollpacker.weights.buffer import BufferLayout, Memory, read


class HostWeights:
    """The weights on one host, and the calls by which a run has them sent and received. Each call
    may be repeated."""

    def __init__(self) -> None:
        self._copies: dict[tuple[str, str, int], Memory] = {}
        """Memory with a copy of a buffer, by the buffer's host, path and inode. One at most."""
        self._port: WeightPort | None = None
        self._arriving: Arriving | None = None
        self._newest = 0
        """Number of the newest shipment that this host was told of."""
        self._lock = threading.Lock()

    def copy(self, source: BufferLayout) -> BufferLayout:
        """Return the memory of this host for a copy of the buffer. The memory is made at the first
        call, and serves all versions. For a layout without memory so far (`BufferLayout.of`), a
        trainer on this host writes it. Raises `ValueError` if there is no room."""
        key = source.host, source.path, source.inode
        if key not in self._copies:
            self._copies.clear()  # one trainer, one buffer: those before are gone
            self._copies[key] = source.memory()
        return source.at(self._copies[key])

    def read(self, layout: BufferLayout, start: int, size: int) -> bytes:
        """Return bytes of a buffer of this host. Raises `OSError` if it is gone."""
        return read(layout, start, size)

    def port(self, address: str) -> PortAddress:
        """Return where other hosts can ask this one for weights; `address` is where they reach this
        host. Raises `OSError`."""
        with self._lock:
            if self._port is None:
                self._port = WeightPort(address)
            return self._port.address

    def send(self, number: int, layout: BufferLayout, head: bytes) -> None:
        """Offer other hosts what the trainer has written here, as the shipment of this number."""
        with self._lock:
            self._check_newest(number)
            assert self._port is not None
            self._port.stream(number, Written(layout, head))

    def take(self, shipment: Shipment, own: int) -> BufferLayout:
        """Bring this shipment here, as the taker of the number `own`, and pass it on. Returns the
        layout of its memory once it is complete. Raises what `Arriving.wait` does, and `ValueError`
        if there is no room."""
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
        """Raises `OSError` for a call about an earlier shipment, which may have come late."""
        if number < self._newest:
            raise OSError("the next version is on its way")
        self._newest = number

    def close(self) -> None:
        """Close the port, and stop taking a shipment. Further calls do nothing."""
        with self._lock:
            if self._port is not None:
                self._port.close()
            if self._arriving is not None:
                self._arriving.give_up()
