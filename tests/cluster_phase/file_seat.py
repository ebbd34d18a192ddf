"""Seats of jobs on one host that share pools without a service: a pool is a lock on a file.

    python -m tests.cluster_phase.file_seat SCRIPT ARGUMENTS...

runs a script with ROLLPACKER_SEAT=FOLDER#JOB; `sit` is for a run. Whoever gets a pool writes that
down, and so does whoever lets go of it, so that `two_at_once` can tell afterwards whether a pool
ever was two jobs'. No turns are kept, and a job that hangs keeps what it has: for tests and
benchmarks of what a job does with its seat.

Files in the folder are the cluster's wishes: `stop-JOB`, that the job stops once it has committed
the step in there; `lost-JOB` takes its lease; nobody enters before all jobs that `all` names have
come. What a script parks is parked on a CPU too, so that who reads it there crashes.
"""

from __future__ import annotations

import fcntl
import json
import os
import runpy
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from rollpacker.cluster.seats import mailbox_seat as seats
from rollpacker.cluster.seats.seat import SEAT_VARIABLE, Iteration, LeaseLost, Seat

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

LOOK_S = 0.002
TURNS_FILE = "turns.jsonl"


class FileSeat:
    """See `Seat`. The locks end with the process."""

    def __init__(self, folder: Path, job: str) -> None:
        self._folder, self._job = folder, job
        self._files: dict[str, int] = {}
        self._lost: str | None = None
        self._last_step = 0
        folder.mkdir(parents=True, exist_ok=True)

    def enter(self, pool: str, purpose: str, *, given_up: threading.Event) -> bool:
        self._wait_for_all()
        file = os.open(self._folder / f"{pool}.lock", os.O_RDWR | os.O_CREAT)
        while True:
            if self._lost is not None:
                raise LeaseLost(self._lost)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if given_up.wait(LOOK_S):
                    os.close(file)
                    return False
        assert pool not in self._files
        self._files[pool] = file
        self._write("entered", pool=pool, purpose=purpose)
        return True

    def leave(self, pool: str) -> None:
        self._write("left", pool=pool)
        os.close(self._files.pop(pool))
        time.sleep(2 * LOOK_S)  # others have their turn

    def committed(self, iteration: Iteration) -> None:
        self._last_step = iteration.step
        self._write("committed", **structs.asdict(iteration))

    def watch(self, lost: Callable[[str], None], stop: Callable[[str], None]) -> None:
        threading.Thread(target=self._watch, args=(lost, stop), daemon=True).start()

    def close(self) -> None:
        for pool in list(self._files):
            self.leave(pool)
        self._write("closed")

    def _wait_for_all(self) -> None:
        (self._folder / f"here-{self._job}").touch()
        everyone = self._folder / "all"
        while everyone.exists() and not all(
            (self._folder / f"here-{job}").exists() for job in everyone.read_text().split()
        ):
            time.sleep(LOOK_S)

    def _watch(self, lost: Callable[[str], None], stop: Callable[[str], None]) -> None:
        while True:
            wish = self._folder / f"stop-{self._job}"
            if wish.exists() and (text := wish.read_text()) and self._last_step >= int(text):
                stop("a file says so")
            if self._lost is None and (self._folder / f"lost-{self._job}").exists():
                self._lost = "a file says so"
                lost(self._lost)
            time.sleep(LOOK_S)

    def _write(self, what: str, **facts: Any) -> None:
        line = {"job": self._job, "pid": os.getpid(), "what": what, "time_s": time.monotonic()}
        with (self._folder / TURNS_FILE).open("a") as file:
            file.write(json.dumps(line | facts) + "\n")


def sit(folder: Path, job: str) -> None:
    """Give this process such a seat, whatever runs in it next."""

    def open_seat(environ: Mapping[str, str]) -> Seat | None:
        return FileSeat(folder, job)

    os.environ[SEAT_VARIABLE] = f"{folder}#{job}"
    seats.open_seat = open_seat


# -- what they wrote ---------------------------------------------------------------


def turns(folder: Path) -> list[dict[str, Any]]:
    """What jobs have written, in order; nothing before the first did."""
    file = folder / TURNS_FILE
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def two_at_once(folder: Path) -> list[str]:
    """Each time that a job came to a pool that another one had. Who was killed writes nothing
    more, and has let go of it."""
    said = turns(folder)
    who = [(turn["job"], turn["pid"]) for turn in said]
    last = {one: number for number, one in enumerate(who)}
    holders: dict[str, tuple[str, int]] = {}
    found = []
    for number, turn in enumerate(said):
        pool = turn.get("pool", "")
        holder = holders.get(pool)
        if turn["what"] == "entered":
            if holder is not None and last[holder] > number:
                found.append(f"{who[number]} came to {pool} of {holder}")
            holders[pool] = who[number]
        elif turn["what"] == "left" and holder == who[number]:
            del holders[pool]
    return found


def jobs_of(folder: Path, pool: str) -> list[str]:
    """The jobs that had the pool, in order."""
    return [
        turn["job"] for turn in turns(folder) if turn["what"] == "entered" and turn["pool"] == pool
    ]


def handed_over(folder: Path) -> Counter[str]:
    """How often each pool went from one job to another."""
    found = Counter[str]()
    for pool in {turn["pool"] for turn in turns(folder) if "pool" in turn}:
        jobs = jobs_of(folder, pool)
        found[pool] = sum(one != other for one, other in pairwise(jobs))
    return found


# -- a script ----------------------------------------------------------------------


def main() -> None:
    """Run the script that the command line names."""
    from rollpacker.cluster.seats import phases
    from rollpacker.weights import host_store

    class AlsoOnCpu(host_store.HostStore):
        """Of storages of a CPU, those that were read from a file cannot be emptied."""

        def __init__(self, source: str) -> None:
            super().__init__("cpu")

        def offload(self, tensors: Iterable[Tensor]) -> int:
            return super().offload(one for one in tensors if one.untyped_storage().resizable())

    phases.open_seat = _open_seat
    host_store.HostStore = AlsoOnCpu
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


def _open_seat(environ: Mapping[str, str]) -> FileSeat:
    folder, _, job = environ[SEAT_VARIABLE].partition("#")
    if not Path(folder).is_dir():
        raise ValueError(f"{folder}: no such seat")
    return FileSeat(Path(folder), job)


if __name__ == "__main__":
    main()
