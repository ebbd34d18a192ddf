"""The contract of a job's side of the cluster (*seat*), by which it waits for its turn on a pool.

    seat.enter("rollout", "round")    returns when the pool's devices are the job's
    seat.leave("rollout")             at once
    seat.committed(...)               an iteration is over, and what it took

A grant is a lease: the seat renews it from a thread of its own for as long as its process runs, and
a process that is stopped or dead loses it. `lost` is called then, and nothing may be done on the
devices any more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from rollpacker.cluster.decide.job import Iteration as Iteration
from rollpacker.core.ids import PoolName

SEAT_VARIABLE = "ROLLPACKER_SEAT"
"""Variable of a job's environment with the address of its seat, set by the service that starts the
job."""
START = "start"
"""Purpose of entering a pool to start a run's parts on its devices."""


class LeaseLost(RuntimeError):
    """Raised when the pool was given to another job, because this one was silent for too long."""


class Seat(Protocol):
    """A job's side of the cluster. All methods may be called from any thread, but `enter` and
    `leave` not at the same time."""

    def enter(self, pool: PoolName, purpose: str, *, given_up: threading.Event) -> bool:
        """Wait until the job holds the pool, and return True; False if `given_up` was set before.
        Raises `LeaseLost`, and `OSError` if the cluster cannot be reached for long."""
        ...

    def leave(self, pool: PoolName) -> None:
        """Give the pool to other jobs. Nothing of this job may be on its devices any more."""
        ...

    def committed(self, iteration: Iteration) -> None:
        """Report to the cluster that an iteration is over, with its seconds."""
        ...

    def watch(self, lost: Callable[[str], None], stop: Callable[[str], None]) -> None:
        """Have `lost` called once the lease of a held pool is over, and `stop` when the cluster
        wants the job to end at its next commit; each with the reason, in a thread of the seat's."""
        ...

    def close(self) -> None:
        """Give up what the job holds, and end the seat. Further calls do nothing."""
        ...


class Alone:
    """A seat for a job that has its pools to itself: nothing waits."""

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
    """Return the value of `SEAT_VARIABLE` for a start of a job, from its mailbox's address."""
    return f"{address}#{job}#{incarnation}"
