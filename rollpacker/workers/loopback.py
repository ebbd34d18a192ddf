"""The network interface that torch's gloo listens on, where all its processes are on one machine.

Left to itself gloo takes the address that the host's name resolves to, which others on the network
reach, and it asks nobody for a token.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

GLOO = "GLOO_SOCKET_IFNAME"
"""The environment variable by which gloo is told."""
INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
"""Name of this machine's loopback interface."""
LOOPBACK = "127.0.0.1"


def gloo_at(address: str) -> dict[str, str]:
    """Return the environment for processes that meet at this address of the machine: where it is
    the loopback they are all here, and gloo listens there as well."""
    return {GLOO: INTERFACE} if address == LOOPBACK else {}


def unless_chosen(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without gloo's interface, if this process's has one already: the
    user's choice, or that of whoever placed the process."""
    return {
        name: one for name, one in environment.items() if name != GLOO or name not in os.environ
    }


@contextmanager
def gloo_on_loopback() -> Iterator[None]:
    """Groups of gloo that are made meanwhile listen on the loopback, unless the environment names
    an interface already. The environment is as before afterwards."""
    if GLOO in os.environ:
        yield
        return
    os.environ[GLOO] = INTERFACE
    try:
        yield
    finally:
        os.environ.pop(GLOO, None)
