"""The parent of a job on this host: it outlives the service, and says how the job ended.

    service .. keeper --> job --> engines, ranks, whatever these start

Run as `python -ISB keeper.py FOLDER COMMAND...`; standard library only. It holds a lock on
FOLDER/keeper for its life, whose file only the first of several makes, writes the job's process
into FOLDER/process, and once the job has ended and all that it started is gone, its exit code into
FOLDER/exit (-N: by signal N).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import time
from typing import NoReturn

KEEPER, PROCESS, EXIT, OUTPUT = "keeper", "process", "exit", "output"
_PR_SET_CHILD_SUBREAPER = 36


def main(folder: str, command: list[str]) -> NoReturn:
    if os.fork():  # whoever started this need not wait for more
        os._exit(0)
    os.setsid()
    if not _is_first(folder):
        os._exit(0)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # meant for the job
    code = 127
    try:
        job = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        print(f"{command[0]}: {error}", file=sys.stderr, flush=True)
    else:
        write(os.path.join(folder, PROCESS), str(job.pid))
        code = job.wait()
        _end_all()
    write(os.path.join(folder, EXIT), str(code))
    os._exit(0)


def _is_first(folder: str) -> bool:
    """Whether no keeper was here before. The file is locked before anybody can see it."""
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
    """What the job has left comes here as an orphan."""
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
    """Whole or not at all."""
    with open(f"{os.fspath(path)}.new", "w") as file:
        file.write(text)
    os.replace(f"{os.fspath(path)}.new", path)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
