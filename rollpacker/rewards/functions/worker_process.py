"""One worker process as the controller sees it: started, told, listened to, ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollpacker.rewards.functions.worker import HEADER, LOAD, MAX_REPLY_BYTES, Frames

LOAD_TIMEOUT_S = 300.0
"""Importing a function and all that it imports may take so long."""

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]);"
    " from rollpacker.rewards.functions.worker import main;"
    " main(int(sys.argv[1]), int(sys.argv[2]))"
)
"""The worker finds modules where this process finds them, and nowhere else."""


class WorkerEnded(RuntimeError):
    """The worker ended by itself; the message says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """Who hears what comes from a worker."""

    message: Callable[[int, int, dict[str, Any]], None]
    """Kind, number of the call, content."""
    output: Callable[[bytes], None]
    """What the function printed."""
    ended: Callable[[], None]
    """The worker is gone, or talks nonsense."""


def is_hello(content: dict[str, Any]) -> bool:
    """Whether it tells of the function, or why it cannot be had; before that comes the pid."""
    return "name" in content or "refused" in content


class WorkerProcess:
    """Started by the constructor. `greet` waits for it outside of an event loop, `attach` lets a
    loop listen to it. Ends with this object at the latest."""

    def __init__(self, name: str, load: bytes, cwd: str) -> None:
        self.name = name
        self.pid: int | None = None
        """Of the process that runs the function, once that is known."""
        self._frames = Frames(MAX_REPLY_BYTES)
        self._unsent = bytearray()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener: Listener | None = None
        self._connection, theirs = socket.socketpair()
        lifeline_read, self._lifeline = os.pipe()
        self._output, output_write = os.pipe()
        paths = [path for path in sys.path if isinstance(path, str)]
        fds = (theirs.fileno(), lifeline_read)
        command = [sys.executable, "-P", "-c", _START, *map(str, fds), json.dumps(paths)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output_write,
                stderr=output_write,
                pass_fds=fds,
                start_new_session=True,
                cwd=cwd,
            )
        except BaseException:
            _close(self._lifeline, self._output)
            self._connection.close()
            raise
        finally:
            theirs.close()
            _close(lifeline_read, output_write)
        os.set_blocking(self._output, False)
        self._end = weakref.finalize(
            self, _end, self._process, self._connection, self._lifeline, self._output, os.getpid()
        )
        self._to_send(LOAD, 0, load)

    # -- outside of a loop ----------------------------------------------------------------

    def greet(self) -> dict[str, Any]:
        """What the worker says of its function. Raises `WorkerEnded` and `TimeoutError`."""
        until = time.monotonic() + LOAD_TIMEOUT_S
        self._connection.setblocking(True)
        try:
            self._connection.sendall(self._unsent)
            self._unsent.clear()
            while True:
                ready, _, _ = select.select(
                    [self._connection], [], [], max(until - time.monotonic(), 0)
                )
                if not ready:
                    raise TimeoutError
                data = self._connection.recv(1 << 16)
                if not data:
                    raise WorkerEnded(self.how_ended(wait_s=2.0))
                for _, _, payload in self._frames.feed(data):
                    hello = self._understood(payload)
                    if is_hello(hello):
                        return hello
        except (BrokenPipeError, ConnectionResetError):
            raise WorkerEnded(self.how_ended(wait_s=2.0)) from None

    def _understood(self, payload: bytes) -> dict[str, Any]:
        content = json.loads(payload, parse_constant=_refuse_constant)
        if not isinstance(content, dict):
            raise ValueError("a reply that is no object")
        self.pid = content.get("pid", self.pid)
        return content

    # -- in a loop --------------------------------------------------------------------------

    def attach(self, loop: asyncio.AbstractEventLoop, listener: Listener) -> None:
        """Let this loop, and none before it, hear what the worker says."""
        self._loop, self._listener = loop, listener
        self._connection.setblocking(False)
        loop.add_reader(self._connection.fileno(), self._readable)
        loop.add_reader(self._output, self._printed)
        self._flush()

    def send(self, kind: int, call: int, payload: bytes = b"") -> None:
        self._to_send(kind, call, payload)
        self._flush()

    def _to_send(self, kind: int, call: int, payload: bytes) -> None:
        self._unsent += HEADER.pack(kind, call, len(payload))
        self._unsent += payload

    def _flush(self) -> None:
        assert self._loop is not None
        try:
            while self._unsent:
                del self._unsent[: self._connection.send(self._unsent)]
        except BlockingIOError:
            self._loop.add_writer(self._connection.fileno(), self._flush)
            return
        except OSError:  # it is gone: reading tells
            self._unsent.clear()
        self._loop.remove_writer(self._connection.fileno())

    def _readable(self) -> None:
        assert self._listener is not None
        try:
            data = self._connection.recv(1 << 18)
            for kind, call, payload in self._frames.feed(data):
                self._listener.message(kind, call, self._understood(payload))
        except BlockingIOError:
            return
        except (OSError, ValueError):
            data = b""
        if not data:
            self._ignore()
            self._listener.ended()

    def _printed(self) -> None:
        assert self._listener is not None and self._loop is not None
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._output, 1 << 16)
            if data:
                self._listener.output(data)
            elif self._end.alive:
                self._loop.remove_reader(self._output)

    def _ignore(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._connection.fileno())
            self._loop.remove_writer(self._connection.fileno())

    def is_stopped(self) -> bool:
        """Whether a signal (SIGSTOP) holds it, as far as this system tells."""
        try:
            status = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return status.rpartition(")")[2].split()[0] == "T"

    # -- the end --------------------------------------------------------------------------

    def how_ended(self, wait_s: float = 0.0) -> str | None:
        """In words; None if it has not ended within `wait_s`."""
        try:
            code = self._process.wait(timeout=wait_s)
        except subprocess.TimeoutExpired:
            return None if wait_s == 0 else "it hung up"
        if code >= 0:
            return f"exit status {code}"
        try:
            return f"signal {-code}, {signal.Signals(-code).name}"
        except ValueError:
            return f"signal {-code}"

    def kill(self) -> None:
        """End it, its children too. They are gone once `how_ended` says how."""
        if self._end.alive:
            with contextlib.suppress(OSError):
                os.write(self._lifeline, b"x")
            self._ignore()

    def end_group(self) -> None:
        """End what a guardian that is stopped, or was killed, has left."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()

    def dispose(self) -> None:
        """Close what this process holds of it. Waits up to 2 s for its end."""
        self._ignore()
        if self._loop is not None and not self._loop.is_closed() and self._end.alive:
            self._loop.remove_reader(self._output)
            self._printed_last()
        self._end()

    def _printed_last(self) -> None:
        with contextlib.suppress(OSError):
            data = os.read(self._output, 1 << 16)
            if data and self._listener is not None:
                self._listener.output(data)


def _end(
    process: subprocess.Popen[bytes],
    connection: socket.socket,
    lifeline: int,
    output: int,
    owner: int,
) -> None:
    if os.getpid() == owner:  # not in a child that was forked
        with contextlib.suppress(OSError):
            os.write(lifeline, b"x")
        try:
            process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    connection.close()
    _close(lifeline, output)


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} in a reply")
