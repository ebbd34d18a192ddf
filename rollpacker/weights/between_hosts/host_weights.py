"""The trainer's weights on one host: what it writes here, copies, and their way to other hosts."""

from __future__ import annotations

import threading

from rollpacker.weights.between_hosts.arriving import Arriving, Shipment
from rollpacker.weights.between_hosts.copies import Copies
from rollpacker.weights.between_hosts.port import PortAddress, WeightPort, Written
from rollpacker.weights.buffer import BufferLayout


class HostWeights:
    """What a run can have a host do with weights. Each may be asked for again."""

    def __init__(self) -> None:
        self._copies = Copies()
        self._port: WeightPort | None = None
        self._arriving: Arriving | None = None
        self._newest = 0
        """Number of the newest shipment that is known here."""
        self._lock = threading.Lock()

    def copy(self, source: BufferLayout) -> BufferLayout:
        """See `Copies.layout`."""
        return self._copies.layout(source)

    def write(self, source: BufferLayout, start: int, data: bytes) -> None:
        """See `Copies.write`."""
        self._copies.write(source, start, data)

    def port(self, address: str) -> PortAddress:
        """Where other hosts can ask this one, which they reach at that address. Raises
        `OSError`."""
        with self._lock:
            if self._port is None:
                self._port = WeightPort(address)
            return self._port.address

    def send(self, number: int, layout: BufferLayout, head: bytes) -> None:
        """Let others have what the trainer has written here, as this shipment."""
        with self._lock:
            self._check_newest(number)
            assert self._port is not None
            self._port.stream(number, Written(layout, head))

    def take(self, shipment: Shipment, own: int) -> BufferLayout:
        """Have this shipment here, as the taker of this number, and pass it on; returns where it
        is, once it is whole. Raises what `Arriving.wait` does, and `ValueError` if there is no
        room."""
        with self._lock:
            self._check_newest(shipment.number)
            there = self._copies.layout(shipment.layout)
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
        """What is asked for again may come late."""
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
