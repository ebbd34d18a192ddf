"""Hosts that take weights, all in this process, and links between them that can be slow or cut."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any

from rollpacker.weights.between_hosts.host_weights import HostWeights
from rollpacker.weights.between_hosts.port import PortAddress

CHUNK = 1 << 16


class Link:
    """Stands before a host's port: counts what comes from there, and can hold it or cut it."""

    def __init__(self, port: PortAddress, bytes_per_s: float | None = None) -> None:
        self.num_bytes = 0
        self.num_connections = 0
        self.is_cut = threading.Event()
        """Connections end, and new ones with them."""
        self.is_held = threading.Event()
        """Nothing comes, and nobody is told."""
        self._there = (port.host, port.port)
        self._bytes_per_s = bytes_per_s
        self._turn = threading.Lock()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = PortAddress("127.0.0.1", self._listening.getsockname()[1], port.token)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listening.accept()
            if self.is_cut.is_set():
                near.close()
                continue
            self.num_connections += 1
            far = socket.create_connection(self._there)
            for way in ((near, far, False), (far, near, True)):
                threading.Thread(target=self._carry, args=way, daemon=True).start()

    def _carry(self, source: socket.socket, to: socket.socket, is_counted: bool) -> None:
        with contextlib.suppress(OSError), source, to:
            source.settimeout(0.05)
            while not self.is_cut.is_set():
                while self.is_held.is_set():
                    time.sleep(0.01)
                with contextlib.suppress(TimeoutError):
                    data = source.recv(CHUNK)
                    if not data:
                        return
                    if is_counted:
                        self._count(len(data))
                    to.sendall(data)

    def _count(self, size: int) -> None:
        with self._turn:
            self.num_bytes += size
            if self._bytes_per_s is not None:
                time.sleep(size / self._bytes_per_s)


class LinkedHost:
    """A host whose port is reached by a link only; meets `Member`."""

    address = "127.0.0.1"

    def __init__(self, name: str, bytes_per_s: float | None = None) -> None:
        self.name = name
        self.weights = HostWeights()
        self.link: Link | None = None
        self.is_dead = threading.Event()
        self._bytes_per_s = bytes_per_s

    def agent(self) -> tuple[object, Any]:
        return self, self._call

    def _call(self, method: str, *arguments: Any) -> Any:
        if method == "port":
            port = self.weights.port(*arguments)
            self.link = self.link or Link(port, self._bytes_per_s)
            return self.link.port
        ended: list[Any] = []

        def work() -> None:
            try:
                ended.append(getattr(self.weights, method)(*arguments))
            except Exception as error:
                ended.append(error)

        threading.Thread(target=work, daemon=True).start()
        while not ended:
            time.sleep(0.005)
            if self.is_dead.is_set():
                raise OSError(f"{self.name} is lost")
        if isinstance(ended[0], Exception):
            raise ended[0]
        return ended[0]

    def die(self) -> None:
        """Nobody reaches it any more, and it reaches nobody."""
        assert self.link is not None
        self.link.is_cut.set()
        self.is_dead.set()
        threading.Thread(target=self.weights.close, daemon=True).start()
