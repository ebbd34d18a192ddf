"""The trainer's weights on one host: the memory that they are written or copied to, and their way
from there to other hosts.

A copy is a buffer of the same bytes (`weights/buffer.py`), so whoever maps it knows by the same
numbers whether it is whole. Its first bytes are written first and its last bytes last.
"""

from __future__ import annotations

import threading

from rollpacker.weights.between_hosts.arriving import Arriving, Shipment
from rollpacker.weights.between_hosts.port import PortAddress, WeightPort, Written
from rollpacker.weights.buffer import BufferLayout, Memory, read


class HostWeights:
    """The weights on one host, and what a run can have the host do with them. Each call may be made
    again."""

    def __init__(self) -> None:
        self._copies: dict[tuple[str, str, int], Memory] = {}
        """Memory by the buffer whose copy it has. There is one at most."""
        self._port: WeightPort | None = None
        self._arriving: Arriving | None = None
        self._newest = 0
        """Number of the newest shipment that is known here."""
        self._lock = threading.Lock()

    def copy(self, source: BufferLayout) -> BufferLayout:
        """Return the memory of this host for a copy of the buffer. It is made when first asked for,
        and serves all versions. For a layout that has no memory yet (`BufferLayout.of`) it is the
        memory that a trainer here writes. Raises `ValueError` if there is no room."""
        key = source.host, source.path, source.inode
        if key not in self._copies:
            self._copies.clear()  # one trainer, one buffer: those before are gone
            self._copies[key] = source.memory()
        return source.at(self._copies[key])

    def read(self, layout: BufferLayout, start: int, size: int) -> bytes:
        """See `read` (weights/buffer.py)."""
        return read(layout, start, size)

    def port(self, address: str) -> PortAddress:
        """Return where other hosts can ask this one, which they reach at that address. Raises
        `OSError`."""
        with self._lock:
            if self._port is None:
                self._port = WeightPort(address)
            return self._port.address

    def send(self, number: int, layout: BufferLayout, head: bytes) -> None:
        """Let others have what the trainer has written here, as the shipment of this number."""
        with self._lock:
            self._check_newest(number)
            assert self._port is not None
            self._port.stream(number, Written(layout, head))

    def take(self, shipment: Shipment, own: int) -> BufferLayout:
        """Bring this shipment here, as the taker of this number, and pass it on. Returns where it
        is, once it is whole. Raises what `Arriving.wait` does, and `ValueError` if there is no
        room."""
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
        """Refuse a call of an earlier shipment, which may come late. Raises `OSError`."""
        if number < self._newest:
            raise OSError("the next version is on its way")
        self._newest = number

    def close(self) -> None:
        """Close the port, and take nothing more. Idempotent."""
        with self._lock:
            if self._port is not None:
                self._port.close()
            if self._arriving is not None:
                self._arriving.give_up()
