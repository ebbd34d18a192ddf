"""Made-up devices: a file each, locked by whoever computes there.

A device is a host's, if the job was told its nodes' hosts: two nodes that are one host have one.

A lock lasts as long as the process that has it, running or stopped, and nobody else can take it
meanwhile: two that are on one device at a time, one of them stopped, are found out.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path

from rollpacker.cluster.on_ray.warden import HOSTS
from rollpacker.cluster.service.local_runner import ROLLOUT_NODES, TRAIN_NODES
from rollpacker.core.ids import PoolName

VIOLATIONS = "violations.jsonl"


class Device:
    def __init__(self, folder: Path, node: str) -> None:
        self.folder = folder
        self.node = node
        self._file = os.open(folder / node.replace("/", "-"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)

    def hold(self, who: str) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = os.pread(self._file, 200, 0).decode()
            seen = {"device": self.node, "comes": who, "is there": other}
            with (self.folder / VIOLATIONS).open("a") as file:
                file.write(json.dumps(seen) + "\n")
            return False
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{who} (pid {os.getpid()})".encode(), 0)
        return True

    def drop(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)


def devices_of(folder: Path, environ: Mapping[str, str], pool: PoolName) -> list[Device]:
    """A job's own, by its environment."""
    nodes = environ[{"rollout": ROLLOUT_NODES, "train": TRAIN_NODES}[pool]]
    return [Device(folder, name) for name in environ.get(HOSTS[pool], nodes).split(",")]


def is_held(folder: Path, node: str) -> bool:
    """Whether somebody computes there."""
    try:
        with (folder / node.replace("/", "-")).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False


def violations(folder: Path) -> list[str]:
    path = folder / VIOLATIONS
    return path.read_text().splitlines() if path.exists() else []
