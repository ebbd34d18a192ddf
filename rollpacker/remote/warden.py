"""Jobs of a cluster on one host: a process that starts them, stops them, kills them and says how
they ended. Behind ray it is an actor (`ray_jobs.py`).

A job is a family of processes under a guardian, which ends all of it when the warden does. What it
has started on *other* hosts is found there by a variable of its environment, `MARK`: the agents
that start a job's processes set it (`cli/hosts.py`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollpacker.processes.child import Child, children

MARK = "ROLLPACKER_JOB"
"""Of the environment of all processes of a job: cluster, name and incarnation."""
HOSTS = {"rollout": "ROLLPACKER_ROLLOUT_HOSTS", "train": "ROLLPACKER_TRAIN_HOSTS"}
"""Of the environment of a job's first process, by role: the addresses of its nodes, with commas.
Not set where every node is the same host."""
GONE_S = 10.0
"""Within which processes are gone that were killed."""
LOOK_S = 0.005
_NUM_SIGNALS = 64


class Warden:
    """All methods may be called again. They raise `OSError`."""

    def __init__(self) -> None:
        self._jobs: dict[str, Child] = {}
        self._stopped = set[str]()

    def knows(self, mark: str) -> bool:
        """Whether this job was started here, ended or not."""
        return mark in self._jobs

    def start(
        self,
        mark: str,
        command: Sequence[str],
        environ: Mapping[str, str],
        folder: str,
        output: str,
    ) -> None:
        """Start the job in this folder, unless that was done already. What it prints goes to the
        end of the file `output`. What an earlier warden has left of it is killed before."""
        if mark in self._jobs:
            return
        kill_marked(mark)
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        # A child has none of ray's variables but those that it is given by name.
        own = [f"{name}={value}" for name, value in environ.items() if name.startswith("RAY_")]
        variables = {**os.environ, **environ, MARK: mark}
        with open(output, "ab") as file:
            self._jobs[mark] = Child.start(
                ["/usr/bin/env", *own, *command],
                mark,
                guarded=True,
                env=variables,
                cwd=folder,
                output=file.fileno(),
            )

    def stop(self, mark: str) -> None:
        """SIGTERM to the job's first process, once: the run ends at its next commit."""
        if mark in self._stopped or self.ended(mark) is not None:
            return
        self._stopped.add(mark)
        for pid in children(self._jobs[mark].process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def kill(self, mark: str) -> None:
        """End all processes of the job on this host. They are gone when this returns."""
        kill_marked(mark)
        if (job := self._jobs.get(mark)) is not None:
            job.close()

    def ended(self, mark: str) -> int | None:
        """The exit code of the job's first process; None: it runs. Negative: a signal's number, and
        -1 for a job that was not started here."""
        if (job := self._jobs.get(mark)) is None:
            return -1
        code = job.process.poll()
        if code is not None and 128 < code <= 128 + _NUM_SIGNALS and not _is_interrupted(code):
            return 128 - code
        return code

    def codes(self) -> dict[str, int | None]:
        """What `ended` says of every job that was started here."""
        return {mark: self.ended(mark) for mark in list(self._jobs)}

    def last_lines(self, output: str, num_bytes: int) -> str:
        """The end of what a job has printed."""
        with contextlib.suppress(OSError), open(output, "rb") as file:
            file.seek(max(os.path.getsize(output) - num_bytes, 0))
            return file.read().decode("utf-8", "replace")
        return ""


def _is_interrupted(code: int) -> bool:
    """130 is what `train` itself returns when it was interrupted."""
    return code == 128 + signal.SIGINT


def kill_marked(mark: str) -> None:
    """SIGKILL to every process of this host that has the mark in its environment, until there is
    none. Raises `OSError` if some stay: a process in the kernel's hands cannot be killed."""
    until = time.monotonic() + GONE_S
    while found := _marked(mark):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > until:
            raise OSError(f"processes {found} of {mark} are still there {GONE_S:g} s after a kill")
        time.sleep(LOOK_S)


def _marked(mark: str) -> list[int]:
    """Those that are not zombies."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # gone, or another user's; a zombie's is empty
            if wanted in path.read_bytes().split(b"\0") and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    return found
