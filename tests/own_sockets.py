"""The sockets of this process. A test that connects to a port in order to see whether its own
process listens there asks the whole machine: the port may be somebody else's by then."""

from __future__ import annotations

import os
import socket
import stat


def bound_addresses() -> set[tuple[str, int]]:
    """The (host, port) that the IPv4 sockets of this process are bound to."""
    found = set()
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            is_socket = stat.S_ISSOCK(os.fstat(descriptor).st_mode)
            copy = os.dup(descriptor) if is_socket else None
        except OSError:  # another thread closed it
            continue
        if copy is not None:
            with socket.socket(fileno=copy) as one:
                if one.family == socket.AF_INET:
                    found.add(one.getsockname())
    return found
