"""Runs jobs that share pools of devices; `cluster/decide/cluster.py` decides who gets which.

A job (a run, or a program that calls `phase`) has a seat (`Seat`), by which it asks the service for
a pool, gives the pool back, and reports each iteration. They exchange messages (*letters*) through
a `Mailbox`: files on one host, or an actor on ray. The service (`Service`) stores what happens as
events (`Store`, in SQLite), and starts and stops jobs by a `Runner`, on this host or on ray.

The service may die at any moment, and so may a job: letters and events outlive both. What a program
of another framework calls is in `seats/phases.py` and `seats/parked.py`, and here by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollpacker.cluster.seats.parked import parking
    from rollpacker.cluster.seats.phases import Stopped, Turn, committed, phase
    from rollpacker.cluster.seats.seat import LeaseLost

__all__ = ["LeaseLost", "Stopped", "Turn", "committed", "parking", "phase"]

_PLACES = {"LeaseLost": "seat", "parking": "parked"}
"""For each exported name that is not in `phases.py`, the module of `cluster/seats/` that has it."""


def __getattr__(name: str) -> Any:
    """Import an exported name at its first use: most importers of this package use none of them."""
    if name in __all__:
        import importlib

        place = f"rollpacker.cluster.seats.{_PLACES.get(name, 'phases')}"
        return getattr(importlib.import_module(place), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
