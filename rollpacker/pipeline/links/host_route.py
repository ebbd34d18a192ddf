"""How the sender and the receiver of a host link find each other: addresses of this host, routes
(addresses, ports and tokens) to a receiver, and how long both ends wait."""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass

GREETING = struct.Struct(">IQ")
"""First bytes of a new connection, after the token: its number among the sender's connections, and
how many connections the sender had made before. The new connection replaces an earlier one of
the same number."""
MAX_CONNECTIONS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """An address at which a sender can reach a receiver, such as that of one network card."""

    host: str
    """The IP address on which the receiver listens."""
    port: int
    token: bytes
    """The secret that a sender must show first when it connects."""
    source: str | None = None
    """The IP address from which the sender connects. None: the kernel chooses it."""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def encode_routes(routes: Sequence[Route]) -> bytes:
    """Encode a receiver's routes as JSON. They include secret tokens, for the sender alone."""
    return json.dumps([(one.host, one.port, one.token.hex()) for one in routes]).encode()


def decode_routes(data: bytes, sources: Sequence[str] = ()) -> tuple[Route, ...]:
    """Decode routes that `encode_routes` has encoded. `sources`: for each route, the IP address
    from which the sender connects; if empty, the kernel chooses."""
    own = (*sources, *(None for _ in json.loads(data)))
    return tuple(
        Route(host=host, port=port, token=bytes.fromhex(token), source=source)
        for (host, port, token), source in zip(json.loads(data), own, strict=False)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long the sender and receiver of a host link wait, in seconds. A slow link is not given
    up: while a message is being received, the receiver says now and then that it is alive."""

    alive_s: float = 0.5
    """Seconds between two signs of life that a receiver sends during a long message."""
    silence_s: float = 2.0
    """Seconds without a sign of life from the receiver after which a sender connects again, over
    another route if there is one, and repeats the message."""
    connect_s: float = 1.0
    """The most seconds that one attempt to make a connection may take."""
    give_up_s: float = 60.0
    """Seconds after which the link counts as lost if its other end cannot be reached."""


_GET_ADDRESS = 0x8915
"""Number of Linux's ioctl request SIOCGIFADDR, which asks for the IPv4 address of an interface."""
_REQUEST = struct.Struct("16s16x8x")
"""Linux's `ifreq`: an interface's name of 16 bytes. In the answer, bytes 20 to 23 are its IP."""
_ADDRESS = slice(20, 24)


def own_addresses(interfaces: Sequence[str]) -> list[str]:
    """Return the IPv4 addresses of these network interfaces, one each. If `interfaces` is empty:
    the address of this host from which MASTER_ADDR is reached, where all ranks have met. Sends
    nothing.

    Raises `ValueError` for an interface that is not there or has no address, and for any on another
    system than Linux.
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
