"""The mailbox of a cluster that runs on ray: a detached actor on the head's host.

The mailbox outlives service and jobs, but not ray's head: then its letters are gone, and a new
mailbox has another epoch. Ray neither restarts the actor nor repeats a call: a caller without an
answer calls again, which every method of a mailbox allows.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from rollpacker.cluster.on_ray.boxes import Boxes
from rollpacker.cluster.seats.mailbox import Letter
from rollpacker.workers.hosts.ray_connection import (
    check_answers,
    connect,
    head_address,
    say_short,
)

NAMESPACE = "rollpacker"
SCHEME = "ray:"
ANSWER_S = 5.0
"""Seconds within which the actor must answer a call, besides the time that a read may wait."""
START_S = 30.0
"""Seconds within which ray must have made the actor."""
MAX_CALLS = 10_000
"""Most calls that the actor serves at once; nearly all of them wait for letters (messages)."""

_Actor: Any = ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0, max_concurrency=MAX_CALLS)(
    Boxes
)


class RayMailbox:
    """The `Mailbox` of a cluster on ray, an actor. This process must be connected to ray."""

    def __init__(self, name: str) -> None:
        """`name`: name of the actor with the letters, in ray's namespace `rollpacker`; it is made
        if there is none. Raises `OSError` if ray cannot make it."""
        self._name = name
        self._head = head_address()
        self._lock = threading.Lock()
        self._actor: Any = None
        self._epoch: str = self._call("epoch", within_s=START_S)

    @property
    def address(self) -> str:
        """The address by which other processes find the mailbox (`open_mailbox`)."""
        return f"{SCHEME}{self._head}/{self._name}"

    @property
    def epoch(self) -> str:
        """Name of this mailbox's epoch at its last answer; it changes once all letters are lost."""
        return self._epoch

    def post(self, box: str, sender: str, key: str, kind: str, facts: Mapping[str, Any]) -> None:
        """Put a letter (message) into a box. One whose `key` its sender used before is ignored."""
        self._epoch = self._call("post", box, sender, key, kind, dict(facts))

    def read(self, box: str, after: int, within_s: float) -> list[Letter]:
        """Return the box's letters with numbers above `after`, as soon as there are some. If there
        are none within `within_s` seconds, return an empty list."""
        waited_s = ANSWER_S + within_s
        epoch, letters = self._call("read", box, after, within_s, within_s=waited_s)
        self._epoch = epoch
        found: list[Letter] = letters
        return found

    def forget(self, box: str, upto: int) -> None:
        """Remove the box's letters (messages) up to the number `upto`."""
        self._epoch = self._call("forget", box, upto)

    def _call(self, method: str, *arguments: Any, within_s: float = ANSWER_S) -> Any:
        actor = None
        try:
            actor = self._boxes()
            return ray.get(getattr(actor, method).remote(*arguments), timeout=within_s)
        except RayActorError as error:  # the next call makes another one
            with self._lock:
                if self._actor is actor:
                    self._actor = None
            raise OSError(f"the mailbox {self._name} is gone: {say_short(error)}") from error
        except (GetTimeoutError, RayError, ConnectionError, RuntimeError, ValueError) as error:
            raise OSError(
                f"the mailbox {self._name} behind ray at {self._head} cannot be reached: "
                f"{say_short(error) or f'no answer within {within_s:g} s'}"
            ) from error

    def _boxes(self) -> Any:
        with self._lock:
            if self._actor is None:
                check_answers(self._head)  # ray itself would wait for a head for a minute
                self._actor = _Actor.options(
                    name=self._name,
                    namespace=NAMESPACE,
                    lifetime="detached",
                    get_if_exists=True,
                    resources={"node:__internal_head__": 0.001},
                ).remote()
            return self._actor

    def remove(self) -> None:
        """End the mailbox's actor; all letters are lost by that."""
        with contextlib.suppress(Exception):  # it is gone, or cannot be reached
            ray.kill(self._boxes())
        self._actor = None


def open_mailbox(address: str) -> RayMailbox:
    """Connect to the ray cluster of this address, and return the mailbox there. Raises `OSError` if
    it cannot be reached, and `ValueError` if the address names no mailbox on ray."""
    head, _, name = address.removeprefix(SCHEME).partition("/")
    if not address.startswith(SCHEME) or not head or not name:
        raise ValueError(f"{address} is no mailbox behind ray: {SCHEME}HOST:PORT/NAME")
    try:
        connect(head)
    except ValueError as error:
        raise OSError(str(error)) from error
    return RayMailbox(name)
