"""The parent of a worker process: it ends the worker, with all that the worker started.

controller --lifeline--> guardian --fork--> worker --> whatever the function starts

It ends them when the controller says so or is gone, however busy or stopped the worker is, and
ends as the worker did when that ends by itself. What they print goes through it: at most
`MAX_OUTPUT_BYTES` a minute reach the controller's log, the rest is dropped here, so that printing
costs the controller nothing.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

MAX_OUTPUT_BYTES = 64 << 10
"""Of output that are kept, per minute."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class OutputQuota:
    """So many bytes a minute; what exceeds them is counted."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._minute = clock()
        self._left = MAX_OUTPUT_BYTES
        self.num_dropped = 0

    def take(self, data: bytes) -> bytes:
        """As much of it as may pass, after a word on what did not pass the minute before."""
        told = b""
        if self._clock() - self._minute >= 60:
            self._minute, self._left = self._clock(), MAX_OUTPUT_BYTES
            if self.num_dropped:
                told = b"\n[%d bytes of output were dropped]\n" % self.num_dropped
                self.num_dropped = 0
        kept = data[: self._left]
        self._left -= len(kept)
        self.num_dropped += len(data) - len(kept)
        return told + kept


def start(serve: Callable[[], None], connection: socket.socket, lifeline: int) -> NoReturn:
    """Run `serve` in a child process and guard it. `connection` is the child's alone, `lifeline`
    the guardian's. The guardian's own stdout leads to the controller's log."""
    guardian = os.getpid()
    prctl = _prctl()
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    wakeup_read, wakeup_write = os.pipe()
    for end in (wakeup_read, wakeup_write):
        os.set_blocking(end, False)
    output_read, output_write = os.pipe()
    worker = os.fork()
    if worker == 0:
        os.setpgid(0, 0)
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guardian:
            os._exit(0)
        os.dup2(output_write, 1)
        os.dup2(output_write, 2)
        for fd in (lifeline, wakeup_read, wakeup_write, output_read, output_write):
            os.close(fd)
        _run(serve)
    with contextlib.suppress(OSError):  # the worker has done so itself, or is gone
        os.setpgid(worker, worker)
    connection.close()
    os.close(output_write)
    os.set_blocking(1, False)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    _Guardian(worker, lifeline, wakeup_read, output_read).run()


def _run(serve: Callable[[], None]) -> NoReturn:
    status = 1
    try:
        serve()
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(status)


def _prctl() -> Callable[[int, int], object]:
    if sys.platform != "linux":
        return lambda option, value: None
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    return lambda option, value: libc.prctl(option, value, 0, 0, 0)


class _Guardian:
    def __init__(self, worker: int, lifeline: int, wakeup: int, output: int) -> None:
        self._worker = worker
        self._lifeline = lifeline
        self._wakeup = wakeup
        self._output = output
        self._controller = os.getppid()
        self._quota = OutputQuota()
        self._told_all = False
        self._poll = select.poll()
        for fd in (lifeline, wakeup, output):
            self._poll.register(fd, select.POLLIN)

    def run(self) -> NoReturn:
        status: int | None = None
        while status is None:
            ready = {fd for fd, _ in self._poll.poll(1000)}
            if self._output in ready:
                self._forward()
            if self._wakeup in ready and signal.SIGTERM in os.read(self._wakeup, 1024):
                break
            if self._lifeline in ready or os.getppid() != self._controller:
                break
            status = self._reap()
        status = self._end_all(status)
        self._end_alike(status)

    def _forward(self) -> None:
        data = os.read(self._output, 1 << 16)
        if not data and not self._told_all:
            self._told_all = True
            self._poll.unregister(self._output)
        kept = self._quota.take(data)
        if kept:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                os.write(1, kept)

    def _reap(self) -> int | None:
        """Collect children that ended, orphans of the worker included. Returns the worker's wait
        status if it is among them."""
        found = None
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid == self._worker:
                    found = status
        return found

    def _end_all(self, status: int | None) -> int | None:
        """Kill the worker, its group, and what has left the group but not the family."""
        until = time.monotonic() + 2
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._worker, signal.SIGKILL)
        while time.monotonic() < until:
            for pid in _children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            found = self._reap()
            status = status if found is None else found
            if status is not None and not _children():
                break
            time.sleep(0.001)
        os.set_blocking(self._output, False)
        with contextlib.suppress(OSError):
            for _ in range(16):  # last words
                self._forward()
        return status

    def _end_alike(self, status: int | None) -> NoReturn:
        if status is not None and os.WIFSIGNALED(status):
            with contextlib.suppress(ImportError):
                import resource

                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            number = os.WTERMSIG(status)
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        os._exit(1 if status is None else os.waitstatus_to_exitcode(status) % 256)


def _children() -> list[int]:
    """Of this process, as far as this system tells."""
    try:
        text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    except OSError:
        return []
    return [int(pid) for pid in text.split()]
