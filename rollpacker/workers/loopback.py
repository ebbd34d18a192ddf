"""Has torch's gloo listen on the loopback interface, if all its processes are on one machine.

By default gloo takes the address that the host's name resolves to, which others on the network
reach, and it demands no token.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

GLOO = "GLOO_SOCKET_IFNAME"
"""Environment variable that names the network interface on which torch's gloo listens."""
INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
"""Name of this machine's loopback interface."""
LOOPBACK = "127.0.0.1"


def gloo_at(address: str) -> dict[str, str]:
    """Return environment variables for processes that meet at this address. If it is the loopback
    address, all are on this machine, and gloo is to listen there too; else there are none."""
    return {GLOO: INTERFACE} if address == LOOPBACK else {}


def unless_chosen(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without gloo's interface if this process's environment names one: it was
    chosen by the user, or by the process that started this one."""
    return {
        name: one for name, one in environment.items() if name != GLOO or name not in os.environ
    }


@contextmanager
def gloo_on_loopback() -> Iterator[None]:
    """During the block, new process groups of gloo listen on the loopback interface, unless the
    environment names another. Afterwards the environment is as before."""
    if GLOO in os.environ:
        yield
        return
    os.environ[GLOO] = INTERFACE
    try:
        yield
    finally:
        os.environ.pop(GLOO, None)
