"""Seats of jobs on one host that share pools without a service: a pool is a lock on a file.

Whoever gets it writes that down, and so does whoever lets go of it, so that `two_at_once` can tell
afterwards whether a pool ever was two jobs'. No turns are kept, and a job that hangs keeps what it
has: for tests and benchmarks of what a job does with its seat.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rollpacker.cluster import seat as seats
from rollpacker.cluster.seat import Iteration, Seat

LOOK_S = 0.002


class FileSeat:
    """See `Seat`. The lock ends with the process."""

    def __init__(self, folder: Path, job: str) -> None:
        self._folder, self._job = folder, job
        self._files: dict[str, int] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def enter(self, pool: str, purpose: str, *, given_up: threading.Event) -> bool:
        file = os.open(self._folder / f"{pool}.lock", os.O_RDWR | os.O_CREAT)
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if given_up.wait(LOOK_S):
                    os.close(file)
                    return False
        assert pool not in self._files
        self._files[pool] = file
        self._write("enter", pool=pool, purpose=purpose)
        return True

    def leave(self, pool: str) -> None:
        self._write("leave", pool=pool)
        os.close(self._files.pop(pool))
        time.sleep(2 * LOOK_S)  # others have their turn

    def committed(self, iteration: Iteration) -> None:
        self._write("committed", **asdict(iteration))

    def watch(self, lost: Callable[[str], None], stop: Callable[[str], None]) -> None:
        pass

    def close(self) -> None:
        for pool in list(self._files):
            self.leave(pool)

    def _write(self, what: str, **facts: Any) -> None:
        line = {"job": self._job, "pid": os.getpid(), "what": what, "time_s": time.monotonic()}
        with (self._folder / "turns.jsonl").open("a") as file:
            file.write(json.dumps(line | facts) + "\n")


def sit(folder: Path, job: str) -> None:
    """Give this process such a seat, whatever runs in it next."""

    def open_seat(environ: Mapping[str, str]) -> Seat | None:
        return FileSeat(folder, job)

    os.environ[seats.SEAT_VARIABLE] = "file"
    seats.open_seat = open_seat


def turns(folder: Path) -> list[dict[str, Any]]:
    """What jobs have written, in order."""
    return [json.loads(line) for line in (folder / "turns.jsonl").read_text().splitlines()]


def two_at_once(folder: Path) -> list[str]:
    """Each time that a job came to a pool that another one had. A killed one has let go of it."""
    holders: dict[str, tuple[str, int]] = {}
    found = []
    for turn in turns(folder):
        who, pool = (turn["job"], turn["pid"]), turn.get("pool", "")
        if turn["what"] == "enter":
            if pool in holders and Path(f"/proc/{holders[pool][1]}").exists():
                found.append(f"{who} came to {pool} of {holders[pool]}")
            holders[pool] = who
        elif turn["what"] == "leave" and holders.pop(pool, None) != who:
            found.append(f"{who} left {pool} of another")
    return found


def handed_over(folder: Path) -> Counter[str]:
    """How often each pool went from one job to another."""
    last: dict[str, str] = {}
    found = Counter[str]()
    for turn in turns(folder):
        if turn["what"] == "enter":
            found[turn["pool"]] += last.get(turn["pool"], turn["job"]) != turn["job"]
            last[turn["pool"]] = turn["job"]
    return found
