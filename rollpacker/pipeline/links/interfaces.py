"""At which addresses this host can be reached by its neighbours' links."""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Sequence

_GET_ADDRESS = 0x8915
"""Linux's SIOCGIFADDR."""
_REQUEST = struct.Struct("16s16x8x")
"""Linux's `ifreq`: a name, and behind the address's family and port 4 bytes of address."""
_ADDRESS = slice(20, 24)


def own_addresses(interfaces: Sequence[str]) -> list[str]:
    """IPv4 addresses of these network interfaces, one each. Without any: the one on the way to the
    ranks' store, where they have all met. Sends nothing.

    Raises `ValueError` for an interface that is not there or has no address, and on another system
    than Linux.
    """
    if not interfaces:
        with socket.socket(type=socket.SOCK_DGRAM) as probe:
            probe.connect((os.environ["MASTER_ADDR"], 9))
            return [str(probe.getsockname()[0])]
    if sys.platform != "linux":
        raise ValueError("train.pipeline.interfaces can be set on Linux alone: leave it empty")
    return [_address(name) for name in interfaces]


def _address(interface: str) -> str:
    import fcntl

    with socket.socket(type=socket.SOCK_DGRAM) as asking:
        try:
            found = fcntl.ioctl(asking, _GET_ADDRESS, _REQUEST.pack(interface.encode()[:15]))
        except OSError as error:
            there = ", ".join(name for _, name in socket.if_nameindex())
            raise ValueError(
                f"train.pipeline.interfaces: {interface} has no IPv4 address on host "
                f"{socket.gethostname()} ({error.strerror}); its interfaces are {there}"
            ) from None
    return socket.inet_ntoa(found[_ADDRESS])
