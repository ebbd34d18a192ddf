"""Starts and ends a cluster's jobs on one host, for a service that may run on another host."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rollpacker.cluster.service import keeper
from rollpacker.cluster.service.local_runner import LocalRunner

if TYPE_CHECKING:
    from rollpacker.cluster.service.runner import JobOrder

HOSTS = {"rollout": "ROLLPACKER_ROLLOUT_HOSTS", "train": "ROLLPACKER_TRAIN_HOSTS"}
"""For each role, the environment variable that names the hosts of the role's nodes (addresses with
commas between) to a job's first process. It is not set if ray has only one host."""

CONTACT_S = 1.0
"""Seconds between two checks whether this host still belongs to the cluster."""

Start = tuple[str, int]
"""A job's name, and the number of one of its starts, from 1."""


class Warden(LocalRunner):
    """Starts and ends jobs on this host, as a ray actor (`jobs.py`). It has no state of its own, so
    that another warden can go on in its place: a job outlives it, and is known by its folder. What
    a job has started on other hosts is found there by its mark, a variable of the environment that
    its processes hand on (`run/parts/hosts.py`).

    A host that is cut off for `keeper.FENCE_S` ends its jobs by itself, because they are started
    elsewhere."""

    def __init__(self, folder: Path, host: str, is_member: Callable[[], bool]) -> None:
        """`host`: this host's address. `is_member`: returns whether ray's head still counts this
        host as a part of the cluster; it is called in a thread."""
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(folder, folder / f"contact-{host}")
        self._is_member = is_member
        self._look()
        threading.Thread(target=self._look_on, name="contact", daemon=True).start()

    def begin(self, order: JobOrder, ray: Mapping[str, str]) -> None:
        """Start the job with the `RAY_` variables of `ray` in its environment, and with no others
        that begin so. Raises `OSError` if this host is cut off from the cluster."""
        if keeper.silent_s(self._contact) > keeper.FENCE_S:
            raise OSError("it is cut off from ray's head")
        without = [f"--unset={name}" for name in os.environ if name.startswith("RAY_")]
        own = [f"{name}={value}" for name, value in ray.items()]
        self.start(replace(order, command=["/usr/bin/env", *without, *own, *order.command]))

    def codes(self, starts: Sequence[Start]) -> dict[Start, int | None]:
        """Return for each start of a job its exit code, or None while it runs."""
        return {start: self.ended(*start) for start in starts}

    def _look_on(self) -> None:
        while True:
            time.sleep(CONTACT_S)
            self._look()

    def _look(self) -> None:
        """Write to a file when this host last belonged to the cluster: the time before the check,
        since the host might be cut off before the answer comes."""
        asked_s = keeper.now_s()
        try:
            if self._is_member():
                keeper.write(self._contact, f"{asked_s}")
        except Exception:  # whatever ray says of a head that does not answer
            return
