"""A job's side: where it waits for its turn on a pool.

    seat.enter("rollout", "round")    returns when the pool's devices are the job's
    seat.leave("rollout")             at once
    seat.committed(...)               an iteration is over, and what it took

A grant is a lease: the seat renews it from a thread of its own for as long as its process runs, and
a process that is stopped or dead loses it. `lost` says so; then nothing may be done on the devices.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from rollpacker.cluster.decide.job import Iteration as Iteration
from rollpacker.core.ids import PoolName

SEAT_VARIABLE = "ROLLPACKER_SEAT"
"""The variable of a job's environment that says where its seat is, as the service that started it
knows."""
START = "start"
"""The purpose for which a run enters a pool whose devices its parts begin on."""


class LeaseLost(RuntimeError):
    """The pool was given to another job: this one was silent for too long."""


class Seat(Protocol):
    """All methods may be called from any thread; `enter` and `leave` by one at a time."""

    def enter(self, pool: PoolName, purpose: str, *, given_up: threading.Event) -> bool:
        """Wait until the pool is the job's. False: `given_up` was set before that, and it is not.
        Raises `LeaseLost`, and `OSError` if the cluster cannot be reached for long."""
        ...

    def leave(self, pool: PoolName) -> None:
        """Give it to others: nothing of the job is on its devices any more."""
        ...

    def committed(self, iteration: Iteration) -> None:
        """Tell what an iteration took."""
        ...

    def watch(self, lost: Callable[[str], None], stop: Callable[[str], None]) -> None:
        """Call `lost` once the lease of a pool that is held is over, and `stop` if the cluster
        wants the job to end at its next commit; with the reason, in a thread of the seat's."""
        ...

    def close(self) -> None:
        """Give up what is held. Idempotent."""
        ...


class Alone:
    """A seat of a job that shares with nobody."""

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
    """The value of `SEAT_VARIABLE` for one start of a job, whose mailbox has this address."""
    return f"{address}#{job}#{incarnation}"
