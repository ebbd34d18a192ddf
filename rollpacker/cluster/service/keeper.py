"""The parent process of a job: it outlives the service, and writes down how the job ended.

It runs as `python -ISB keeper.py FOLDER CONTACT COMMAND...`, with the standard library only. While
it lives it holds a lock on FOLDER/keeper, a file that only the first keeper of a start can make. It
writes the number of the job's process into FOLDER/process and, once the job and all that it started
are gone, its exit code into FOLDER/exit (-N: by signal N).

CONTACT is a file with the time when this host last belonged to the cluster (`now_s`), or empty if
the cluster is this host. `FENCE_S` after that time the keeper ends the job: by then a service that
cannot reach this host counts the job as gone, and starts it elsewhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import subprocess
import sys
import time
from typing import NoReturn

KEEPER, PROCESS, EXIT, OUTPUT = "keeper", "process", "exit", "output"
FENCE_S = 30.0
"""Seconds without contact to the cluster after which the jobs of a host are ended."""
LOOK_S = 1.0
_PR_SET_CHILD_SUBREAPER = 36


def main(folder: str, contact: str, command: list[str]) -> NoReturn:
    if os.fork():  # whoever started this need not wait for more
        os._exit(0)
    os.setsid()
    if not _is_first(folder):
        os._exit(0)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # meant for the job
    code = 127
    try:
        if contact and silent_s(contact) > FENCE_S:
            raise OSError("this host is not one of the cluster's now")
        job = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        print(f"{command[0]}: {error}", file=sys.stderr, flush=True)
    else:
        write(os.path.join(folder, PROCESS), str(job.pid))
        code = _wait(job, contact)
        _end_all()
    write(os.path.join(folder, EXIT), str(code))
    os._exit(0)


def _wait(job: subprocess.Popen[bytes], contact: str) -> int:
    """Wait until the job has ended, or end it once this host is cut off by the file `contact`.
    Returns its exit code."""
    ended = select.poll()
    ended.register(os.pidfd_open(job.pid), select.POLLIN)
    while not ended.poll(1000 * LOOK_S):
        if contact and (seconds := silent_s(contact)) > FENCE_S:
            told = f"this host was cut off from the cluster for {seconds:.0f} s: the job ends here"
            print(told, file=sys.stderr, flush=True)
            job.kill()
            break
    return job.wait()


def now_s() -> float:
    """Return seconds on a clock that all processes of a host share, and that counts its sleep."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def silent_s(contact: str | os.PathLike[str]) -> float:
    """Return the seconds since this host's last contact to the cluster; infinity if unknown."""
    try:
        with open(contact) as file:
            return now_s() - float(file.read())
    except (OSError, ValueError):
        return float("inf")


def _is_first(folder: str) -> bool:
    """Whether this process is the first keeper (parent process) of this start of the job: it could
    make the start's file, which it holds locked for as long as it lives."""
    own = os.path.join(folder, f"{KEEPER}.{os.getpid()}")
    lock = os.open(own, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.write(lock, str(os.getpid()).encode())
    try:
        os.link(own, os.path.join(folder, KEEPER))
    except FileExistsError:
        return False
    finally:
        os.unlink(own)
    return True


def _end_all() -> None:
    """Kill all processes that the job has left behind, which are children of this process now."""
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            children = file.read().split()
        if not children:
            return
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.002)


def write(path: str | os.PathLike[str], text: str) -> None:
    """Write a file in one step: a reader sees the old text or the new one."""
    draft = f"{os.fspath(path)}.{os.getpid()}"
    with open(draft, "w") as file:
        file.write(text)
    os.replace(draft, path)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
