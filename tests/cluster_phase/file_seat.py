"""A seat for tests: a pool is a locked file, and a journal tells who had it when.

    python -m tests.cluster_phase.file_seat SCRIPT ARGUMENTS...

runs a script with ROLLPACKER_SEAT=FOLDER#JOB. A file `stop-JOB` in the folder is the cluster's wish
that the job stops once it has committed the step in there, and `lost-JOB` takes its lease. Nobody
enters before all jobs that the file `all` names have come. What is parked is parked on a CPU too,
so that who reads it there crashes.
"""

from __future__ import annotations

import fcntl
import json
import runpy
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from torch import Tensor

from rollpacker import host_store
from rollpacker.cluster import phases
from rollpacker.cluster.seat import SEAT_VARIABLE, Iteration, LeaseLost


class FileSeat:
    def __init__(self, folder: Path, job: str) -> None:
        self.folder, self.job = folder, job
        self.held: dict[str, TextIO] = {}
        self.lost: str | None = None
        self.last_step = 0

    def enter(self, pool: str, purpose: str, *, given_up: threading.Event) -> bool:
        (self.folder / f"here-{self.job}").touch()
        everyone = self.folder / "all"
        while everyone.exists() and not all(
            (self.folder / f"here-{job}").exists() for job in everyone.read_text().split()
        ):
            time.sleep(0.002)
        lock = (self.folder / pool).open("a")
        while not given_up.is_set():
            if self.lost is not None:
                raise LeaseLost(self.lost)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.002)
                continue
            self.held[pool] = lock
            self.write("entered", pool=pool, purpose=purpose)
            return True
        return False

    def leave(self, pool: str) -> None:
        self.write("left", pool=pool)
        self.held.pop(pool).close()

    def committed(self, iteration: Iteration) -> None:
        self.last_step = iteration.step
        self.write("committed", **asdict(iteration))

    def watch(self, lost: Callable[[str], None], stop: Callable[[str], None]) -> None:
        threading.Thread(target=self._watch, args=(lost, stop), daemon=True).start()

    def close(self) -> None:
        self.write("closed")

    def write(self, what: str, **facts: Any) -> None:
        with (self.folder / "journal").open("a") as file:
            file.write(json.dumps({"job": self.job, "what": what, **facts}) + "\n")

    def _watch(self, lost: Callable[[str], None], stop: Callable[[str], None]) -> None:
        while True:
            wish = self.folder / f"stop-{self.job}"
            if wish.exists() and (text := wish.read_text()) and self.last_step >= int(text):
                stop("the test wants it")
            if self.lost is None and (self.folder / f"lost-{self.job}").exists():
                self.lost = "the test took it"
                lost(self.lost)
            time.sleep(0.002)


def open_seat(environ: Mapping[str, str]) -> FileSeat:
    folder, _, job = environ[SEAT_VARIABLE].partition("#")
    if not Path(folder).is_dir():
        raise ValueError(f"{folder}: no such seat")
    return FileSeat(Path(folder), job)


def journal(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "journal").read_text().splitlines()]


def turns(folder: Path, pool: str) -> list[str]:
    """The jobs that had the pool, in order. No two had it at once, and all have left it."""
    holder, jobs = None, []
    for entry in journal(folder):
        if entry.get("pool") == pool:
            if entry["what"] == "entered":
                assert holder is None, f"{entry} while {holder} has it"
                holder = entry["job"]
                jobs.append(holder)
            else:
                assert holder == entry["job"], f"{entry}, and {holder} has it"
                holder = None
    assert holder is None, f"{holder} never left"
    return jobs


class AlsoOnCpu(host_store.HostStore):
    """Of storages of a CPU, those that were read from a file cannot be emptied."""

    def __init__(self, source: str) -> None:
        super().__init__("cpu")

    def offload(self, tensors: Iterable[Tensor]) -> int:
        return super().offload(one for one in tensors if one.untyped_storage().resizable())


if __name__ == "__main__":
    phases.open_seat = open_seat
    host_store.HostStore = AlsoOnCpu
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
