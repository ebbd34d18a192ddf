"""How the two ends of a host link find each other: addresses of this host, routes to a receiver,
and how long both ends wait."""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass

GREETING = struct.Struct(">IQ")
"""The greeting of a connection, after the token: its place among those of the sender, and how many
the sender had made before. A later connection of the same place replaces an earlier one."""
MAX_CONNECTIONS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One way to a receiver, such as over one of two network cards."""

    host: str
    """The receiver's address."""
    port: int
    token: bytes
    """The secret that the receiver asks for."""
    source: str | None = None
    """The sender's own address on this route. None: the kernel's choice."""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def encode_routes(routes: Sequence[Route]) -> bytes:
    """Encode a receiver's routes, tokens included, which only its sender may see."""
    return json.dumps([(one.host, one.port, one.token.hex()) for one in routes]).encode()


def decode_routes(data: bytes, sources: Sequence[str] = ()) -> tuple[Route, ...]:
    """Decode routes that `encode_routes` has encoded. `sources`: the sender's own address on each
    route; empty: the kernel's choice."""
    own = (*sources, *(None for _ in json.loads(data)))
    return tuple(
        Route(host=host, port=port, token=bytes.fromhex(token), source=source)
        for (host, port, token), source in zip(json.loads(data), own, strict=False)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long the ends of a host link wait, in seconds. A slow link is not given up: while a
    message is being received, the receiver gives signs of life."""

    alive_s: float = 0.5
    """Seconds between two signs of life that the receiver of a message gives."""
    silence_s: float = 2.0
    """Seconds of silence after which a sender makes the connection anew, over another route if
    there is one, and sends again."""
    connect_s: float = 1.0
    """Seconds that making a connection may take."""
    give_up_s: float = 60.0
    """Seconds after which the link is lost if the peer cannot be reached."""


_GET_ADDRESS = 0x8915
"""Linux's SIOCGIFADDR."""
_REQUEST = struct.Struct("16s16x8x")
"""Linux's `ifreq`: a name, and behind the address's family and port 4 bytes of address."""
_ADDRESS = slice(20, 24)


def own_addresses(interfaces: Sequence[str]) -> list[str]:
    """Return IPv4 addresses of these network interfaces, one each. Without any interface: this
    host's address on the way to the store at MASTER_ADDR, where all ranks have met. Sends nothing.

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
