"""How the two ends of a host link find each other, and how patient they are."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass

GREETING = struct.Struct(">IQ")
"""What a connection says after the token: its place among those of the sender, and how many the
sender had made before. A later one of the same place replaces an earlier one."""
MAX_CONNECTIONS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One way to a receiver. With two network cards there are two."""

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
    """Write a receiver's routes, tokens included: only its sender must see them."""
    return json.dumps([(one.host, one.port, one.token.hex()) for one in routes]).encode()


def decode_routes(data: bytes, sources: Sequence[str] = ()) -> tuple[Route, ...]:
    """Read what `encode_routes` has written. `sources`: the sender's own address on each route."""
    own = (*sources, *(None for _ in json.loads(data)))
    return tuple(
        Route(host=host, port=port, token=bytes.fromhex(token), source=source)
        for (host, port, token), source in zip(json.loads(data), own, strict=False)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long the ends of a host link wait, in seconds. A link that is merely slow is never too
    slow: somebody who receives says so all the time."""

    alive_s: float = 0.5
    """The receiver of a message says so often that it is there."""
    silence_s: float = 2.0
    """A sender that hears nothing for so long makes the connection anew, over another route if
    there is one, and sends again."""
    connect_s: float = 1.0
    """Making a connection may take so long."""
    give_up_s: float = 60.0
    """The link is lost if the peer cannot be reached for so long."""
