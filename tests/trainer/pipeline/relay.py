"""A relay on a TCP route, which breaks its connections or swallows what they carry."""

from __future__ import annotations

import contextlib
import random
import socket
import threading


class Relay:
    """Listens on a port of its own and passes everything on to another one."""

    def __init__(self, host: str, port: int) -> None:
        self._to = host, port
        self._listening = socket.create_server((host, 0))
        self.port: int = self._listening.getsockname()[1]
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        self.num_killed = 0
        self.passes = threading.Event()
        """Cleared: it holds on to everything and greets nobody, as a cut cable would."""
        self.passes.set()
        self._closed = False
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            self.passes.wait()
            with self._lock:
                if self._closed:
                    near.close()
                    return
                try:
                    pair = near, socket.create_connection(self._to)
                except OSError:
                    near.close()
                    continue
                self._pairs.append(pair)
                for a, b in (pair, pair[::-1]):
                    thread = threading.Thread(target=self._pass, args=(a, b))
                    thread.start()
                    self._threads.append(thread)

    def _pass(self, a: socket.socket, b: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := a.recv(1 << 16):
                self.passes.wait()
                b.sendall(data)
        _shut(a, b)

    def kill(self, random_: random.Random) -> None:
        """Break one of the connections that are open, wherever it is in a message."""
        with self._lock:
            self._pairs = [pair for pair in self._pairs if _is_open(pair[0])]
            if self._pairs:
                _shut(*random_.choice(self._pairs))
                self.num_killed += 1

    def close(self) -> None:
        self.passes.set()
        with self._lock:
            self._closed = True
            _shut(self._listening, *(one for pair in self._pairs for one in pair))
        for thread in self._threads:
            thread.join()
        self._listening.close()
        for pair in self._pairs:
            for one in pair:
                one.close()


def _is_open(one: socket.socket) -> bool:
    try:
        one.getpeername()
    except OSError:
        return False
    return True


def _shut(*sockets: socket.socket) -> None:
    for one in sockets:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
