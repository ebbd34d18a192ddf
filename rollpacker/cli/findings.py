"""Looks at a machine for `rollpacker doctor`: one `Finding` per fact, with its cure. Nothing is
changed. Torch is imported inside functions."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rollpacker.run.parts import this_host

GIB = 1 << 30
LOW_MEMORY_GIB = 4
LOW_DISK_GIB = 10
NO_DISK_GIB = 1
LOW_SHARED_MIB = 256
LOW_OPEN_FILES = 1024
LOW_PROCESSES = 512


@dataclass(frozen=True, slots=True)
class Finding:
    level: Literal["ok", "warn", "fail"]
    """How bad the fact is. "fail" means that training cannot start."""
    name: str
    text: str
    cure: str = ""
    """One sentence on what to do about the fact. Empty if nothing is to be done."""
    details: dict[str, Any] = field(default_factory=dict)


class Untried(Exception):
    """Raised by a check that needs another one's result; the message names that check."""


def python() -> Finding:
    kind = f"{platform.system()} {platform.release()} {platform.machine()}"
    return Finding("ok", "python", f"{platform.python_version()} ({sys.executable}) on {kind}")


def packages() -> Finding:
    """Finding on whether every package that is needed is installed, in a version that fits. The
    lowest versions in `pyproject.toml` have no known security hole."""
    from importlib.metadata import metadata

    wrong = {
        extra: _wrong(extra)
        for extra in ("", *metadata("rollpacker").get_all("Provides-Extra", ()))
    }
    if needed := [*wrong.pop(""), *wrong.pop("train", [])]:
        cure = "Run make again, or: pip install 'rollpacker[train]'"
        return Finding("fail", "packages", "; ".join(needed), cure)
    without = [extra for extra, lacks in wrong.items() if lacks and extra != "dev"]
    rest = f"; optional parts that are not: {', '.join(without)}" if without else ""
    return Finding("ok", "packages", f"all there, in versions that fit{rest}")


def _wrong(extra: str) -> list[str]:
    """Packages that are missing or do not have the version needed, in words. `extra`: only packages
    that this extra adds; "" for packages that are always needed."""
    from importlib.metadata import PackageNotFoundError, requires, version

    from packaging.requirements import Requirement

    wrong = []
    for one in map(Requirement, requires("rollpacker") or ()):
        added = one.marker is not None and "extra" in str(one.marker)
        applies = one.marker is None or one.marker.evaluate({"extra": extra})
        if not applies or added != bool(extra) or one.name == "rollpacker":
            continue
        try:
            have = version(one.name)
        except PackageNotFoundError:
            wrong.append(f"{one.name} is missing")
            continue
        if not one.specifier.contains(have, prereleases=True):
            wrong.append(f"{one.name} is {have}, needed is {one.specifier}")
    return wrong


def cpus() -> Finding:
    """Finding on the number of processors that this process may use, which a cgroup can limit."""
    usable, quota = this_host.shown_cpus(), this_host.cgroup_cpus()
    if quota is None or quota >= usable:
        return Finding("ok", "processors", f"{usable:g}", details={"usable": usable})
    text = f"{quota:g} by the cgroup's quota, though {usable:g} are shown"
    cure = f"Set train.threads={max(1, int(quota))}, so that threads do not wait for each other."
    return Finding("warn", "processors", text, cure, {"usable": quota})


def memory() -> Finding:
    total, free = this_host.memory_bytes()
    limit = this_host.cgroup_memory_bytes()
    text = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if limit is not None and limit < total:
        text += f"; this cgroup may use {limit / GIB:.1f} GiB"
        free = min(free, limit)
    details = {"free_bytes": free, "total_bytes": total, "cgroup_bytes": limit}
    if free >= LOW_MEMORY_GIB * GIB:
        return Finding("ok", "memory", text, details=details)
    cure = "End other programs, or raise the container's limit; small models need about 2 GiB."
    return Finding("warn", "memory", text, cure, details)


def disk(folder: Path) -> Finding:
    """Finding on whether the disk of this folder, which holds runs, has enough room for them."""
    there = folder.expanduser().absolute()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    text = f"{free / GIB:.1f} GiB free for {folder}/"
    details = {"free_bytes": free}
    if not os.access(there, os.W_OK):
        return Finding(
            "fail", "disk", f"{there} is not writable", "Set runs_dir to another folder.", details
        )
    if free >= LOW_DISK_GIB * GIB:
        return Finding("ok", "disk", text, details=details)
    level: Literal["fail", "warn"] = "fail" if free < NO_DISK_GIB * GIB else "warn"
    cure = "Free some space, or set runs_dir to another disk: checkpoints hold model and optimizer."
    return Finding(level, "disk", text, cure, details)


def shared_memory() -> list[Finding]:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return []
    size = shutil.disk_usage(folder).total
    text = f"{size / GIB:.1f} GiB" if size >= GIB else f"{size >> 20} MiB"
    if size >= LOW_SHARED_MIB << 20:
        return [Finding("ok", "/dev/shm", text)]
    return [Finding("warn", "/dev/shm", text, "Start the container with --shm-size=2g.")]


def open_limits() -> Finding:
    """Finding on how many files and processes this user may have open at once."""
    import resource

    limits = (resource.RLIMIT_NOFILE, LOW_OPEN_FILES), (resource.RLIMIT_NPROC, LOW_PROCESSES)
    have = [(resource.getrlimit(kind)[0], low) for kind, low in limits]
    files, processes = ("unlimited" if limit < 0 else str(limit) for limit, _ in have)
    text = f"{files} open files, {processes} processes"
    commands = zip(have, ("ulimit -n 65536", "ulimit -u 4096"), strict=True)
    cures = [command for (limit, low), command in commands if 0 <= limit < low]
    if not cures:
        return Finding("ok", "limits", text)
    return Finding("warn", "limits", text, f"Run first: {'; '.join(cures)}")


def torch_build() -> Finding:
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    if getattr(torch.version, "hip", None):
        build = f"ROCm {torch.version.hip}"
    threads = f"{torch.get_num_threads()} threads unless measured otherwise"
    return Finding("ok", "torch", f"{torch.__version__} ({build}), {threads}")


def gpus() -> list[Finding]:
    """Findings on the GPUs that torch sees, or on why torch sees none where there is one."""
    import torch

    driver = _driver()
    if torch.cuda.is_available():
        return [_gpu(number, driver) for number in range(torch.cuda.device_count())]
    if driver is None:
        return [Finding("ok", "gpu", "none; training runs on the processors (small models)")]
    build = (
        "has no CUDA" if torch.version.cuda is None else f"(CUDA {torch.version.cuda}) sees none"
    )
    cure = "Install a CUDA build of torch that this driver can run; check CUDA_VISIBLE_DEVICES."
    return [Finding("warn", "gpu", f"driver {driver}, but this torch {build}", cure)]


def _gpu(number: int, driver: str | None) -> Finding:
    import torch

    free, total = torch.cuda.mem_get_info(number)
    text = f"{torch.cuda.get_device_properties(number).name}: "
    text += f"{free / GIB:.1f} of {total / GIB:.1f} GiB free, driver {driver or 'unknown'}"
    cures = []
    if free < 0.8 * total:
        cures.append("another program uses it (see nvidia-smi, CUDA_VISIBLE_DEVICES)")
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        text += ", without bf16"
        cures.append("set model.dtype=float32")
    if not cures:
        return Finding("ok", f"gpu {number}", text)
    return Finding("warn", f"gpu {number}", text, f"{'; '.join(cures)}.")


def _driver() -> str | None:
    """The version of NVIDIA's driver. None if there is no driver."""
    text = this_host.read_text(Path("/proc/driver/nvidia/version"))
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return found[1] if found else ("of unknown version" if text else None)
