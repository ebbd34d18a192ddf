"""Starts and ends a cluster's jobs on one host, for a service that may be on another one."""

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
"""Variables of the environment of a job's first process, by role. They have the addresses of its
nodes, with commas, and are not set where every node is the same host."""

CONTACT_S = 1.0
"""Seconds between two looks whether this host is one of the cluster's."""

Start = tuple[str, int]
"""A job's name, and its incarnation."""


class Warden(LocalRunner):
    """Behind ray an actor (`ray_jobs.py`). It keeps nothing, so that another one can go on in its
    place: a job outlives it, and is known by its folder. What a job has started on other hosts is
    found there by its mark, which its processes hand on (`run/parts/hosts.py`).

    A host that is not the cluster's for `keeper.FENCE_S` has no job any more: nobody could end what
    is left there, and the job is started elsewhere."""

    def __init__(self, folder: Path, host: str, is_member: Callable[[], bool]) -> None:
        """`is_member`: whether those who look for hosts find this one; asked in a thread."""
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(folder, folder / f"contact-{host}")
        self._is_member = is_member
        self._look()
        threading.Thread(target=self._look_on, name="contact", daemon=True).start()

    def begin(self, order: JobOrder, ray: Mapping[str, str]) -> None:
        """See `start`. Of ray's variables the job has these and none of this process's, which are
        an actor's. Raises `OSError` on a host that is cut off."""
        if keeper.silent_s(self._contact) > keeper.FENCE_S:
            raise OSError("it is cut off from ray's head")
        without = [f"--unset={name}" for name in os.environ if name.startswith("RAY_")]
        own = [f"{name}={value}" for name, value in ray.items()]
        self.start(replace(order, command=["/usr/bin/env", *without, *own, *order.command]))

    def codes(self, starts: Sequence[Start]) -> dict[Start, int | None]:
        """See `ended`: of each."""
        return {start: self.ended(*start) for start in starts}

    def _look_on(self) -> None:
        while True:
            time.sleep(CONTACT_S)
            self._look()

    def _look(self) -> None:
        """Write down that this host is one of the cluster's, with the time of the question and not
        of the answer: nothing later is then written for a host that was not found later."""
        asked_s = keeper.now_s()
        try:
            if self._is_member():
                keeper.write(self._contact, f"{asked_s}")
        except Exception:  # whatever ray says of a head that does not answer
            return
