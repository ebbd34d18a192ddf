"""Tail batching between the steps of a trainer that is not RollPacker's. docs/scheduler.md has the
page."""

from rollpacker.scheduler.scheduler import Counted, Host, Request, Scheduler, Step

__all__ = ["Counted", "Host", "Request", "Scheduler", "Step"]
