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
"""Environment variable with the name of the interface that gloo listens on."""
INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
"""Name of this machine's loopback interface."""
LOOPBACK = "127.0.0.1"


def gloo_at(address: str) -> dict[str, str]:
    """Return variables for processes that meet at this address. If that is the loopback address,
    all are on this machine, and gloo is to listen there too; else none."""
    return {GLOO: INTERFACE} if address == LOOPBACK else {}


def unless_chosen(environment: Mapping[str, str]) -> dict[str, str]:
    """Return these variables without gloo's interface, if this process's environment has that one:
    then it was chosen by the user, or by the starter of this process."""
    return {
        name: one for name, one in environment.items() if name != GLOO or name not in os.environ
    }


@contextmanager
def gloo_on_loopback() -> Iterator[None]:
    """Inside the block, new groups of gloo listen on the loopback, unless the environment names an
    interface. Afterwards the environment is as before."""
    if GLOO in os.environ:
        yield
        return
    os.environ[GLOO] = INTERFACE
    try:
        yield
    finally:
        os.environ.pop(GLOO, None)
