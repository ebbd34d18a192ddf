"""Which of a step's optimizer steps trains on which group."""

from __future__ import annotations


def updates_of(num_groups: int, num_updates: int) -> tuple[int, ...]:
    """The update of each group, from 0, dealt out in turn: whatever order groups came in, every
    update has of all of it, and their numbers of groups differ by at most one. A step that is short
    of groups has fewer updates rather than empty ones."""
    assert num_groups >= 0 and num_updates >= 1, (num_groups, num_updates)
    return tuple(group % num_updates for group in range(num_groups))
