"""The contract of a job's side of the cluster (*seat*), by which it waits for its turn on a pool.

`enter` returns when the pool's devices are the job's, `leave` gives them back, and `committed`
reports that an iteration is over. A grant of a pool is a lease: the seat renews it from a thread of
its own for as long as its process runs, and a process that is stopped or dead loses it. `lost`, a
function given to `watch`, is called then, and nothing may be done on the devices any more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from rollpacker.cluster.decide.job import Iteration as Iteration
from rollpacker.core.ids import PoolName

SEAT_VARIABLE = "ROLLPACKER_SEAT"
"""Variable of a job's environment that the service sets to the address of the job's seat."""
START = "start"
"""Purpose to give to `enter` to start a run's parts on the pool: it allows longer silence."""


class LeaseLost(RuntimeError):
    """Raised when this job's pool went to another, because the job was silent for too long."""


class Seat(Protocol):
    """A job's side of the cluster, by which it waits for pools. All methods may be called in any
    thread, but `enter` and `leave` not at the same time."""

    def enter(self, pool: PoolName, purpose: str, *, given_up: threading.Event) -> bool:
        """Wait until the job holds the pool, and return True; False if `given_up` is set by then.
        `purpose`: what the pool is for: round, step or `START`. Raises `LeaseLost` if a pool was
        lost, and `OSError` if the cluster is out of reach for long."""
        ...

    def leave(self, pool: PoolName) -> None:
        """Give the pool to other jobs. Nothing of this job may be left on the pool's devices."""
        ...

    def committed(self, iteration: Iteration) -> None:
        """Report to the cluster that an iteration is over, with the seconds of its phases."""
        ...

    def watch(self, lost: Callable[[str], None], stop: Callable[[str], None]) -> None:
        """Have `lost` called if the cluster takes a held pool away, and `stop` if it wants the job
        to end after its iteration. Each gets the reason, and is called in a thread of the seat."""
        ...

    def close(self) -> None:
        """Give back the pool that the job holds, and end the seat. Further calls do nothing."""
        ...


class Alone:
    """The seat of a job that has its pools to itself: no call waits or reports anything."""

    def enter(self, pool: PoolName, purpose: str, *, given_up: threading.Event) -> bool:
        return not given_up.is_set()

    def leave(self, pool: PoolName) -> None:
        pass

    def committed(self, iteration: Iteration) -> None:
        pass

    def watch(self, lost: Callable[[str], None], stop: Callable[[str], None]) -> None:
        pass

    def close(self) -> None:
        pass


def seat_variable(address: str, job: str, incarnation: int) -> str:
    """Return the value of `SEAT_VARIABLE` for one start of a job. `address`: address of the
    cluster's mailbox. `incarnation`: number of the start."""
    return f"{address}#{job}#{incarnation}"
