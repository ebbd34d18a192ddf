"""The store in which the trainer's ranks meet: where it is, and who serves it."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its stub hides it


def store_of(host: str, port: int, *, is_master: bool, listen_fd: int | None = None) -> TCPStore:
    """Served here, or reached there. Torch comes with the call."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its stub hides it

    return TCPStore(
        host, port, is_master=is_master, wait_for_workers=False, master_listen_fd=listen_fd
    )


def store_at(address: str) -> TCPStore:
    """Serve a store that is reached at this address alone: left to itself, torch's listens on every
    interface, whatever host it is given."""
    with socket.create_server((address, 0)) as listening:
        port = listening.getsockname()[1]
        return store_of(address, port, is_master=True, listen_fd=listening.detach())


def served_at(address: str, port: int) -> dict[str, str]:
    """Return the environment in which torchrun would say where its store is."""
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
