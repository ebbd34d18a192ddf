"""Tail batching between the steps of a trainer that is not RollPacker's. docs/scheduler.md has the
page."""

from rollpacker.scheduler.cursor import Counted
from rollpacker.scheduler.scheduler import Host, Request, Scheduler, Step

__all__ = ["Counted", "Host", "Request", "Scheduler", "Step"]
