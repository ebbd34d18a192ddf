"""Tail batching between the steps of a trainer that is not RollPacker's. docs/scheduler.md has the
page."""

from rollpacker.scheduler.scheduler import (
    FOLDER,
    Counted,
    Host,
    Request,
    Scheduler,
    Step,
    has_state,
)

__all__ = ["FOLDER", "Counted", "Host", "Request", "Scheduler", "Step", "has_state"]
