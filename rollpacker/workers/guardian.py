"""The parent of a child process: a program that runs another one and kills all its descendants.

    owner --lifeline--> guardian --> child --> whatever that starts

Run as `python -ISB guardian.py LIFELINE COMMAND...`; standard library only. The guardian kills the
child and all descendants when the owner wants that or is gone, however busy or stopped the child
is. Descendants outside of the child's process group are included: as orphans they become the
guardian's children. If the child ends by itself, the guardian kills the rest and ends with the
same exit code (128 + N: signal N).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from typing import NoReturn

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_EXPENDABLE = "500"
"""The child's score, of -1000 to 1000, for being killed when memory runs out: it is to be killed
before its owner, which can replace it."""
_LOOK_MS = 1000 if hasattr(os, "pidfd_open") else 50
_END_S = 2.0
"""Seconds for which the guardian waits for the killed processes to be gone."""


def main(lifeline: int, command: list[str]) -> NoReturn:
    owner, guardian = os.getppid(), os.getpid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    os.set_inheritable(lifeline, False)
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guardian:
            os._exit(1)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write(_EXPENDABLE)
        try:
            os.execv(command[0], command)
        finally:
            os._exit(127)
    with contextlib.suppress(OSError):  # the child has done so itself, or is gone
        os.setpgid(child, child)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # meant for the child, or for everybody
    for fd in map(int, os.listdir("/dev/fd")):  # the child's: only it may keep its lines open
        if fd > 2 and fd != lifeline:
            with contextlib.suppress(OSError):
                os.close(fd)
    status = _end_all(child, _watched(child, lifeline, owner))
    code = 1 if status is None else os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _watched(child: int, lifeline: int, owner: int) -> int | None:
    """Wait until the child ends by itself, and return its wait status. None: the owner (the process
    that started the guardian) wants the child ended, or is gone."""
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    if hasattr(os, "pidfd_open"):
        poll.register(os.pidfd_open(child), select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll(_LOOK_MS)}
        if lifeline in ready or os.getppid() != owner:
            return None
        if (status := _reap(child)) is not None:
            return status


def _reap(child: int) -> int | None:
    """Collect all ended children of the guardian, orphans included. Returns the child's wait status
    if it is among them, else None."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == child:
                found = status
    return found


def _end_all(child: int, status: int | None) -> int | None:
    """Kill the child and all descendants. Returns the child's wait status, else `status`."""
    until = time.monotonic() + _END_S
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    while time.monotonic() < until:
        for pid in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        found = _reap(child)
        status = status if found is None else found
        if status is not None and not _children():
            break
        time.sleep(0.001)
    return status


def _children() -> list[int]:
    """Return the ids of the guardian's children. Empty where the system does not list them."""
    with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]
    return []


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
