"""Who starts and ends a cluster's jobs on one host, for a service that may be on another one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rollpacker.cluster.local_runner import LocalRunner

if TYPE_CHECKING:
    from rollpacker.cluster.runner import Order

HOSTS = {"rollout": "ROLLPACKER_ROLLOUT_HOSTS", "train": "ROLLPACKER_TRAIN_HOSTS"}
"""Of the environment of a job's first process, by role: the addresses of its nodes, with commas.
Not set where every node is the same host."""

Start = tuple[str, int]
"""A job's name, and its incarnation."""


class Warden(LocalRunner):
    """Behind ray an actor (`ray_jobs.py`). It keeps nothing, so that another one can go on in its
    place: a job outlives it, and is known by its folder. What a job has started on other hosts is
    found there by its mark, which its processes hand on (`cli/hosts.py`)."""

    def knows(self, start: Start) -> bool:
        """Whether this job was started here, ended or not."""
        return self.ended(*start) != -1

    def begin(self, order: Order, ray: Mapping[str, str]) -> None:
        """See `start`. Of ray's variables the job has these and none of this process's, which are
        an actor's."""
        without = [f"--unset={name}" for name in os.environ if name.startswith("RAY_")]
        own = [f"{name}={value}" for name, value in ray.items()]
        self.start(replace(order, command=["/usr/bin/env", *without, *own, *order.command]))

    def codes(self, starts: Sequence[Start]) -> list[int | None]:
        """See `ended`: of each."""
        return [self.ended(*start) for start in starts]
