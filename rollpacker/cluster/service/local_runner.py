"""Runs jobs as processes of this host, which outlive the service.

FOLDER/jobs/NAME/INCARNATION/ has the files of one start of a job (`keeper.py`), and
FOLDER/jobs/NAME/output what all starts of the job have printed. The processes of a start are found
by their parents and by a variable of the environment, which all descendants inherit.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rollpacker.cluster.decide.nodes import Node
from rollpacker.cluster.service import keeper
from rollpacker.cluster.service.runner import JobOrder

MARK = "ROLLPACKER_START"
"""Environment variable of a job's processes: the folder of their start. It marks what to kill."""
ROLLOUT_NODES, TRAIN_NODES = "ROLLPACKER_ROLLOUT_NODES", "ROLLPACKER_TRAIN_NODES"
"""Variables of a job's environment with its nodes: POOL/NUMBER, separated by commas."""
ENDING = "ending"
"""File in the folder of a job's start that lists the processes which are being killed. It is
removed once all of them are gone."""
START_S = 10.0
GONE_S = 10.0
LAST_BYTES = 4000
_LOOK_S = 0.002
_NUM_LOOKS = 2
"""Number of searches in a row that must find no process of a job before it counts as gone: a search
may miss a process that is just being forked."""


class LocalRunner:
    """The `Runner` that starts and ends jobs as processes of this host."""

    def __init__(self, folder: Path, contact: Path | None = None) -> None:
        """`contact`: file with the time of this host's last contact to the cluster (`keeper.py`);
        None if the cluster is this host."""
        self._folder = folder.absolute() / "jobs"
        self._contact = "" if contact is None else str(contact.absolute())

    def start(self, order: JobOrder) -> None:
        place = self._place(order.job, order.incarnation)
        if (place / keeper.KEEPER).exists() or _code(place) is not None:
            return  # it was, or it was killed before it could be
        command = [shutil.which(order.command[0]) or order.command[0], *order.command[1:]]
        place.mkdir(parents=True, exist_ok=True)
        environ = {
            **os.environ,
            **order.environ,
            MARK: str(place),
            ROLLOUT_NODES: _names(order.rollout_nodes),
            TRAIN_NODES: _names(order.train_nodes),
        }
        with (place.parent / keeper.OUTPUT).open("ab") as output:
            kept = subprocess.run(
                [sys.executable, "-ISB", keeper.__file__, str(place), self._contact, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environ,
                cwd=order.folder,
                check=False,
            )
        if kept.returncode:
            raise OSError(f"job {order.job}: {self.last_lines(order.job).strip()}")
        until = time.monotonic() + START_S
        while not (place / keeper.KEEPER).exists():
            if time.monotonic() > until:
                raise OSError(f"job {order.job} has not started within {START_S:g} s")
            time.sleep(_LOOK_S)

    def has_host(self, node: Node) -> bool:
        return True

    def stop(self, job: str, incarnation: int) -> None:
        place = self._place(job, incarnation)
        with contextlib.suppress(OSError, ValueError):
            pid = int((place / keeper.PROCESS).read_text())
            if _is_marked(pid, _mark(place)):
                os.kill(pid, signal.SIGTERM)

    def kill(self, job: str, incarnation: int) -> None:
        place = self._place(job, incarnation)
        mark = _mark(place)
        until = time.monotonic() + GONE_S
        looks, written = 0, _read_ending(place)
        found = written
        while looks < _NUM_LOOKS:
            found = _family(mark, found)
            looks = 0 if found else looks + 1
            if found.keys() - written.keys():
                # Who ends loses its mark before its devices: another kill may have to go on here.
                with contextlib.suppress(OSError):  # a full disk lets nobody live
                    keeper.write(place / ENDING, json.dumps(found))
                    written = found
            for pid in found:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > until:
                raise OSError(f"job {job}: processes {sorted(found)} do not end")
            time.sleep(_LOOK_S)
        if _code(place) is None:
            place.mkdir(parents=True, exist_ok=True)
            keeper.write(place / keeper.EXIT, str(-signal.SIGKILL))
        (place / ENDING).unlink(missing_ok=True)

    def ended(self, job: str, incarnation: int) -> int | None:
        place = self._place(job, incarnation)
        if (place / ENDING).exists():  # somebody was about to end it
            self.kill(job, incarnation)
        if not (place / keeper.KEEPER).exists():
            return -1
        if (code := _code(place)) is not None:
            return code
        with (place / keeper.KEEPER).open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
        if _code(place) is None:  # somebody has killed the keeper
            self.kill(job, incarnation)
        return _code(place)

    def last_lines(self, job: str) -> str:
        path = self._folder / job / keeper.OUTPUT
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
            return file.read().decode(errors="replace")
        return ""

    def want(self, num_nodes: Mapping[str, int]) -> None:
        """Do nothing: a single host's nodes are fixed, and no autoscaler can add more."""

    def _place(self, job: str, incarnation: int) -> Path:
        return self._folder / job / str(incarnation)


def _code(place: Path) -> int | None:
    with contextlib.suppress(FileNotFoundError):
        return int((place / keeper.EXIT).read_text())
    return None


def _names(nodes: Sequence[Node]) -> str:
    return ",".join(f"{node.pool}/{node.number}" for node in nodes)


# -- processes ---------------------------------------------------------------------


def _mark(place: Path) -> bytes:
    return f"{MARK}={place}".encode()


class _Process(NamedTuple):
    parent: int
    began: str
    """Time when the process began, in ticks: another process may later have the same number."""


_Processes = dict[int, _Process]
"""The processes of a host, or some of them, by process number."""


def _read_ending(place: Path) -> _Processes:
    """Return the processes listed in a start's file `ENDING`, whose killing may not be over yet.
    Empty if there is no such file."""
    with contextlib.suppress(FileNotFoundError):
        known = json.loads((place / ENDING).read_text())
        return {int(pid): _Process(*one) for pid, one in known.items()}
    return {}


def _is_marked(pid: int, mark: bytes) -> bool:
    """Whether the process belongs to a job's start: its environment has the variable `mark`. If its
    first thread has ended, another thread's environment is read. False if all have ended."""
    here = Path(f"/proc/{pid}")
    for path in (here / "environ", *here.glob("task/*/environ")):
        with contextlib.suppress(OSError):
            if environ := path.read_bytes():
                return mark in environ.split(b"\0")
    return False


def _family(mark: bytes, known: Mapping[int, _Process]) -> _Processes:
    """Return the processes with a start's mark in their environment, their descendants, and those
    of `known` that still exist: a process that ends loses its environment before its devices."""
    here = _processes()
    still = {pid for pid, one in known.items() if pid in here and here[pid].began == one.began}
    found = still | {pid for pid in here if _is_marked(pid, mark)}
    while more := {pid for pid, one in here.items() if one.parent in found} - found:
        found |= more
    return {pid: here[pid] for pid in found}


def _processes() -> _Processes:
    """Return all processes of this host. A process counts until its last thread has ended, since
    its files and devices are open until then."""
    found = {}
    # Not glob("[0-9]*/stat"): it looks itself, and raises for a process that ends meanwhile.
    for path in (process / "stat" for process in Path("/proc").glob("[0-9]*")):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            state, parent, num_threads, began = (fields[n] for n in (0, 1, 17, 19))
            if state != "Z" or int(num_threads) > 1:
                found[int(path.parent.name)] = _Process(int(parent), began)
    return found
