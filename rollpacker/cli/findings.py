"""What `rollpacker doctor` finds out about a machine: one `Finding` per fact, with its cure.

Nothing here changes anything. Torch is imported inside functions.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from packaging.requirements import Requirement

    from rollpacker.trackers.tracker import TrackerConfig

GIB = 1 << 30
LOW_MEMORY_GIB = 4
LOW_DISK_GIB = 10
NO_DISK_GIB = 1
LOW_SHARED_MIB = 256
LOW_OPEN_FILES = 1024
LOW_PROCESSES = 512

UNSAFE_BELOW = (
    ("torch", "2.10", "torch.load can be made to corrupt memory (CVE-2026-24747)"),
    ("transformers", "4.48", "loading a model can run code from its files (CVE-2024-11393)"),
    ("vllm", "0.14", "it runs code from a model's config unasked (CVE-2026-22807)"),
    ("ray", "2.54", "its dashboard lets any web page stop jobs (CVE-2026-27482)"),
)
"""Packages that need not be installed, their first safe version, and why."""

_CGROUPS = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60
"""Kernels write about 2**63 where there is none."""


@dataclass(frozen=True, slots=True)
class Finding:
    level: Literal["ok", "warn", "fail"]
    """fail: training cannot start."""
    name: str
    text: str
    cure: str = ""
    """One sentence, for all that is not ok."""
    details: dict[str, Any] = field(default_factory=dict)


def system() -> Finding:
    kind = f"{platform.system()} {platform.release()} {platform.machine()}"
    if sys.platform == "linux":
        return Finding("ok", "system", kind)
    cure = "Set sandbox.url to a service such as SandboxFusion if you need code or math rewards."
    return Finding("warn", "system", f"{kind}: the embedded sandbox needs Linux", cure)


def python() -> Finding:
    return Finding("ok", "python", f"{platform.python_version()} ({sys.executable})")


def packages() -> Finding:
    """Whether every package that we need is there, in a version that we know."""
    from importlib.metadata import metadata

    needed = _requirements("")
    if wrong := _wrong(needed):
        cure = "Run make again, or: pip install --editable ."
        return Finding("fail", "packages", "; ".join(wrong), cure)
    text = f"all {len(needed)} there, in versions that fit"
    extras = metadata("rollpacker").get_all("Provides-Extra") or []
    without = [name for name in extras if name != "dev" and _wrong(_requirements(name))]
    if without:
        text += f"; optional parts that are not: {', '.join(without)}"
    return Finding("ok", "packages", text)


def _requirements(extra: str) -> list[Requirement]:
    """Packages that we need, or that one of our extras adds to these."""
    from importlib.metadata import requires

    from packaging.requirements import Requirement

    found = []
    for one in (Requirement(line) for line in requires("rollpacker") or ()):
        added = one.marker is not None and "extra" in str(one.marker)
        applies = one.marker is None or one.marker.evaluate({"extra": extra})
        if applies and added == bool(extra) and one.name != "rollpacker":
            found.append(one)
    return found


def _wrong(needed: Sequence[Requirement]) -> list[str]:
    """What is missing of these, or has another version."""
    from importlib.metadata import PackageNotFoundError, version

    wrong = []
    for one in needed:
        try:
            have = version(one.name)
        except PackageNotFoundError:
            wrong.append(f"{one.name} is missing")
            continue
        if not one.specifier.contains(have, prereleases=True):
            wrong.append(f"{one.name} is {have}, needed is {one.specifier}")
    return wrong


def unsafe_versions() -> list[Finding]:
    """Known holes in what is installed."""
    from importlib.metadata import PackageNotFoundError, version

    from packaging.version import Version

    found, safe = [], []
    for name, floor, why in UNSAFE_BELOW:
        try:
            have = version(name)
        except PackageNotFoundError:
            continue
        if Version(have) < Version(floor):
            cure = f"pip install '{name}>={floor}'"
            found.append(Finding("warn", "safety", f"{name} {have}: {why}", cure))
        else:
            safe.append(f"{name} {have}")
    return found or [Finding("ok", "safety", f"no known hole in {', '.join(safe)}")]


def cpus() -> Finding:
    """Processors that this process may really use."""
    affine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    usable: float = affine or os.cpu_count() or 1
    quota = cgroup_cpus()
    if quota is None or quota >= usable:
        return Finding("ok", "processors", f"{usable:g}", details={"usable": usable})
    text = f"{quota:g} by the cgroup's quota, though {usable:g} are shown"
    cure = f"Set train.threads={max(1, int(quota))}, so that threads do not wait for each other."
    return Finding("warn", "processors", text, cure, {"usable": quota})


def memory() -> Finding:
    total, free = _memory_bytes()
    limit = cgroup_memory_bytes()
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
    """Whether the disk on which runs are written has room for them."""
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
    """Files and processes that this user may have."""
    import resource

    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    text = f"{_count(files)} open files, {_count(processes)} processes"
    cures = []
    if 0 <= files < LOW_OPEN_FILES:
        cures.append("ulimit -n 65536")
    if 0 <= processes < LOW_PROCESSES:
        cures.append("ulimit -u 4096")
    if not cures:
        return Finding("ok", "limits", text)
    return Finding("warn", "limits", text, f"Run first: {'; '.join(cures)}")


def torch_build() -> Finding:
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    if getattr(torch.version, "hip", None):
        build = f"ROCm {torch.version.hip}"
    threads = torch.get_num_threads()
    return Finding(
        "ok", "torch", f"{torch.__version__} ({build}), {threads} threads unless measured otherwise"
    )


def gpus() -> list[Finding]:
    """Accelerators, as torch sees them, and why it sees none where there is one."""
    import torch

    driver = _driver()
    if torch.cuda.is_available():
        return [_gpu(number, driver) for number in range(torch.cuda.device_count())]
    if driver is None:
        return [Finding("ok", "gpu", "none; training runs on the processors (small models)")]
    if torch.version.cuda is None:
        cure = "Install a CUDA build of torch (pip install torch, without a CPU index)."
        return [Finding("warn", "gpu", f"driver {driver}, but this torch has no CUDA", cure)]
    cure = "Check nvidia-smi and CUDA_VISIBLE_DEVICES; the driver may be too old for this torch."
    text = f"driver {driver}, but torch (CUDA {torch.version.cuda}) sees no device"
    return [Finding("warn", "gpu", text, cure)]


def _gpu(number: int, driver: str | None) -> Finding:
    import torch

    properties = torch.cuda.get_device_properties(number)
    free, total = torch.cuda.mem_get_info(number)
    text = f"{properties.name}: {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    text += f", driver {driver}" if driver else ""
    if free >= 0.8 * total:
        return Finding("ok", f"gpu {number}", text)
    cure = "Another program uses it: see nvidia-smi, or choose one by CUDA_VISIBLE_DEVICES."
    return Finding("warn", f"gpu {number}", text, cure)


def bf16() -> Finding:
    import torch

    if torch.cuda.is_available():
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return Finding("ok", "bf16", "by the GPU; model.dtype=auto takes it")
        text = "not by this GPU, which model.dtype=auto would take it on"
        return Finding("warn", "bf16", text, "Set model.dtype=float32.")
    flags = _read(Path("/proc/cpuinfo"))
    has = [name for name in ("avx512_bf16", "amx_bf16") if name in flags]
    by = f"by the processor ({', '.join(has)})" if has else "not by the processor"
    return Finding("ok", "bf16", f"{by}; model.dtype=auto takes float32 here")


def tracker(config: TrackerConfig) -> Finding:
    """Whether a tracker can be used; a run goes on without one that cannot."""
    from rollpacker.trackers.by_name import make_tracker
    from rollpacker.trackers.sending import TrackerProblem

    made = make_tracker(config)
    lacking = made.missing()
    try:
        if lacking is None:
            return Finding("ok", config.name, made.check())
    except TrackerProblem as problem:
        lacking = str(problem)
    text, _, cure = lacking.partition(": ")
    return Finding("warn", config.name, f"{text}; a run goes on without it", cure)


def cgroup_cpus() -> float | None:
    """The smallest quota from here up, in processors. None: no quota."""
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
    """The smallest limit from here up. None: no limit."""
    names = ("memory.max", "memory.limit_in_bytes")
    texts = [text for name in names for text in _cgroup_files("memory", name)]
    limits = [int(text) for text in texts if text.isdigit()]
    return min((limit for limit in limits if limit < _NO_LIMIT), default=None)


def _cgroup_files(controller: str, name: str) -> Iterator[str]:
    """Contents of this file in our own cgroup and in those above it, of version 1 or 2."""
    for line in _read(Path("/proc/self/cgroup")).splitlines():
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
                if text := _read(folder / name).strip():
                    yield text
                folder = folder.parent


def _memory_bytes() -> tuple[int, int]:
    """Bytes of memory that the machine has, and that are free for programs."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    found = re.search(r"MemAvailable:\s*(\d+) kB", _read(Path("/proc/meminfo")))
    return total, int(found[1]) << 10 if found else total


def _driver() -> str | None:
    """The version of NVIDIA's driver; None where there is no driver."""
    text = _read(Path("/proc/driver/nvidia/version"))
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return found[1] if found else ("of unknown version" if text else None)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _count(limit: int) -> str:
    return "unlimited" if limit < 0 else str(limit)
