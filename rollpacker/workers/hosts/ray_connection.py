"""This process's connection to a ray cluster, by token only (`token.py`). A process has one at
most, which its run and its cluster mailbox share."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from rollpacker.workers.hosts.token import PATH, is_demanded

LOWEST = (2, 54)
"""First version of ray with token authentication that works without its dashboard."""
REACH_S = 5.0
CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")
"""The file in which `ray start` writes the address of the cluster that this machine belongs to."""
_LONGEST = 1000
"""The most bytes read of the file with the head's address, which is shorter."""
LOCAL = "local"
"""Stands in place of an address for a new cluster of this machine alone, as in ray itself."""

_lock = threading.Lock()
_num_users = 0


def connect(address: str, *, log_to_driver: bool = False) -> None:
    """Connect to the cluster whose head is at `address` (HOST:PORT), or start one of this machine
    alone that ends with this process (`LOCAL`). If this process is connected already, it stays so,
    whatever the address. Call `disconnect` as often as this. Raises `ValueError` with one message
    for a mistake that the user can correct."""
    global _num_users
    assert is_demanded(), "ray looks for its token when it is imported: `demand_token` comes first"
    with _lock:
        if not ray.is_initialized():
            _init(address, log_to_driver)
        _num_users += 1


def disconnect() -> None:
    """Undo one `connect`. The connection to ray ends once each `connect` was undone."""
    global _num_users
    with _lock:
        _num_users = max(_num_users - 1, 0)
        if _num_users == 0:
            ray.shutdown()


def _init(address: str, log_to_driver: bool) -> None:
    check_version()
    options: dict[str, Any] = {"address": address}
    if address == LOCAL:
        options["include_dashboard"] = False
    else:
        check_answers(address)
    with _own_signals():
        try:
            ray.init(configure_logging=False, log_to_driver=log_to_driver, **options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            ray.shutdown()
            raise ValueError(
                f"ray at {address} refused this process: {' '.join(str(error).split())[:300]}. Is "
                f"the token in {os.environ[PATH]} the cluster's?"
            ) from error


def find_head() -> str | None:
    """Return the address of the head of the cluster that RAY_ADDRESS names or this machine belongs
    to, or None without one. Raises `ValueError` if another user may have written that address."""
    return os.environ.get("RAY_ADDRESS") or _running()


def head_address() -> str:
    """Return the address of the connected cluster's head, as all hosts reach it."""
    address: str = ray.get_runtime_context().gcs_address
    return address


def check_version() -> None:
    """Raise `ValueError` if the installed ray is too old for token authentication."""
    found = tuple(int(part) for part in ray.__version__.split(".")[:2])
    if found < LOWEST:
        raise ValueError(
            f"ray {ray.__version__} is installed, and runtime=ray needs "
            f"{'.'.join(map(str, LOWEST))} or newer, which asks everybody for a token: "
            "make cluster installs one"
        )


def _running() -> str | None:
    """Return the address of the head of this machine's cluster; None if no head answers. Raises
    `ValueError` as `find_head` does."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        found = _read_own(CURRENT_CLUSTER)
        with contextlib.suppress(ValueError):
            check_answers(found)
            return found
    return None


def _read_own(path: Path) -> str:
    """Return the text of a short file that this user or root has written.

    Where ray does not run, any user may make the folder of the file, and the address in the file is
    sent the token. Raises `ValueError` if the file is another user's or no plain file, and
    `FileNotFoundError` or `NotADirectoryError` if it does not exist.
    """
    refusal = ValueError(
        f"{path} says where ray's head is, and is not a file that this user or root has written "
        "(the head would be sent the cluster's token): set RAY_ADDRESS to HOST:PORT of the head"
    )
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:  # a link, or one that this user may not read
        raise refusal from error
    try:
        facts = os.fstat(descriptor)
        if facts.st_uid not in (os.geteuid(), 0) or not stat.S_ISREG(facts.st_mode):
            raise refusal
        return os.read(descriptor, _LONGEST).decode(errors="replace").strip()
    finally:
        os.close(descriptor)


def check_answers(address: str) -> None:
    """Raise `ValueError` if no server answers at this address. Ray itself would wait for twenty
    seconds, and report a wrong token in the same words."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"{address} is no address of a ray cluster: it is HOST:PORT of its head")
    try:
        socket.create_connection((host, int(port)), timeout=REACH_S).close()
    except OSError as error:
        raise ValueError(
            f"nobody answers at {address}, where ray's head should be ({error}): start it there "
            "with ray start --head, or set RAY_ADDRESS to where it is"
        ) from error


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep this process's signal handlers: ray's own would end it in the middle of a step."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # not in the main thread, where ray sets none
            for number, handler in kept.items():
                signal.signal(number, handler)


def say_short(error: Exception) -> str:
    """Return the sentence of ray's long error text that tells what happened, cut if it is long."""
    text = " ".join(str(error).split())
    found = re.search(r"The actor (?:is dead|died)[^.]*\.", text)
    return found.group() if found else text[:200]
