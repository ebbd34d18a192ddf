"""The processors, memory and GPUs of this machine that a run's processes may use."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollpacker.core.placement.roles import DeviceKind, Host

THIS_HOST = "this host"

_CGROUPS = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60
"""Number of bytes from which on a memory limit counts as none, since kernels write about 2**63 for
no limit."""


def this_host(kind: DeviceKind) -> Host:
    """Returns this machine's cores and memory, as far as this process may use them. `kind`: for
    `cuda`, the CUDA devices that torch sees are added."""
    from rollpacker.core.placement.roles import Host

    total_bytes, _ = memory_bytes()
    gpus: tuple[int, ...] = ()
    if kind == "cuda":
        import torch

        gpus = tuple(
            torch.cuda.get_device_properties(number).total_memory
            for number in range(torch.cuda.device_count())
        )
    return Host(
        name=THIS_HOST,
        cores=max(int(min(shown_cpus(), cgroup_cpus() or float("inf"))), 1),
        memory_bytes=min(total_bytes, cgroup_memory_bytes() or total_bytes),
        gpu_bytes=gpus,
        shm_bytes=_shm_bytes(),
    )


def shown_cpus() -> int:
    """Number of processors that this process may run on, without regard to a cgroup's quota."""
    affine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return affine or os.cpu_count() or 1


def cgroup_cpus() -> float | None:
    """Returns the smallest CPU quota of this process's cgroup and its parents, as a number of
    processors. None if there is no quota."""
    quotas = []
    for text in _cgroup_files("cpu", "cpu.max"):
        quota, _, period = text.partition(" ")
        if quota.isdigit():
            quotas.append(int(quota) / int(period or 100_000))
    for quota, period in zip(
        _cgroup_files("cpu", "cpu.cfs_quota_us"),
        _cgroup_files("cpu", "cpu.cfs_period_us"),
        strict=False,
    ):
        if quota.isdigit() and period.isdigit():
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def cgroup_memory_bytes() -> int | None:
    """Returns the smallest memory limit, in bytes, of this process's cgroup and its parents. None
    if there is no limit."""
    names = ("memory.max", "memory.limit_in_bytes")
    texts = [text for name in names for text in _cgroup_files("memory", name)]
    limits = [int(text) for text in texts if text.isdigit()]
    return min((limit for limit in limits if limit < _NO_LIMIT), default=None)


def _cgroup_files(controller: str, name: str) -> Iterator[str]:
    """Yields the text of the file `name` in this process's cgroup and in each of its parents.
    `controller`: name of the hierarchy in cgroups of version 1."""
    for line in read_text(Path("/proc/self/cgroup")).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            mounts = [_CGROUPS, _CGROUPS / "unified"]
        elif controller in controllers.split(","):
            mounts = [_CGROUPS / controller, _CGROUPS / controllers]
        else:
            continue
        for mount in dict.fromkeys(mounts):
            folder = mount / path.strip("/")
            while folder.is_relative_to(mount):
                if text := read_text(folder / name).strip():
                    yield text
                folder = folder.parent


def memory_bytes() -> tuple[int, int]:
    """Returns the machine's memory in bytes, and how many of these bytes programs can still get."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    found = re.search(r"MemAvailable:\s*(\d+) kB", read_text(Path("/proc/meminfo")))
    return total, int(found[1]) << 10 if found else total


def _shm_bytes() -> int | None:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None
    return found.f_frsize * found.f_blocks


def read_text(path: Path) -> str:
    """Returns the file's text; an empty text if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
