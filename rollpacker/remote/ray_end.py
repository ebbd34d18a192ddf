"""Ends what a ray of one machine leaves behind when the run that started it is killed.

    run --lifeline--> this program, which waits for its end

A raylet may take ten seconds to notice, and two helpers of it stay for a minute, in which they try
to tell a GCS that has died with it. Run as `python -ISB ray_end.py RAYLET < LIFELINE`; standard
library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

WAIT_S = 2.0
"""For the raylet to end by itself: it should with the run, or at its `ray.shutdown`."""


def main(raylet: int) -> None:
    sys.stdin.buffer.read()
    until = time.monotonic() + WAIT_S
    while _lives(raylet) and time.monotonic() < until:
        time.sleep(0.05)
    for pid in (*([raylet] if _is_raylet(raylet) else []), *started_by(raylet)):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def started_by(raylet: int) -> Iterator[int]:
    """Processes that this raylet has started, whether it lives or not."""
    own, sign = os.readlink("/proc/self/ns/pid"), b"RAY_RAYLET_PID=%d" % raylet
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # another user's, or gone
            is_its = sign in (path / "environ").read_bytes().split(b"\0")
            if is_its and os.readlink(path / "ns" / "pid") == own:
                yield int(path.name)


def _is_raylet(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"raylet/raylet" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _lives(pid: int) -> bool:
    try:
        return _stat(pid)[0] != "Z"
    except OSError:
        return False


def _stat(pid: int) -> list[str]:
    """State, parent and so on of a process. Raises `OSError` if there is none."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def start() -> subprocess.Popen[bytes] | None:
    """The program for the raylet that this process has started. Its end of the pipe is closed with
    this process, or before by who has it."""
    # Not by task/*/children: those lists lack some while others end.
    for path in Path("/proc").glob("[0-9]*"):
        pid = int(path.name)
        with contextlib.suppress(OSError):
            if int(_stat(pid)[1]) == os.getpid() and _is_raylet(pid):
                return subprocess.Popen(
                    [sys.executable, "-ISB", __file__, str(pid)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # a Ctrl-C is not for it
                )
    return None


if __name__ == "__main__":
    main(int(sys.argv[1]))
