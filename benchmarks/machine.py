"""Facts of the machine that a number was measured on, and the file that keeps both.

`write_result(name, payload)` puts the machine, the versions, the commit, the command line and the
date beside the numbers in `benchmarks/results/NAME.json`. `lab.py` calls it for a benchmark.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("rollpacker", "torch", "transformers", "trl", "reasoning-gym", "numpy")


def machine_info() -> dict[str, Any]:
    """Processor, cores, memory (GiB), accelerator and the load average when asked. No host name."""
    info: dict[str, Any] = {
        "system": platform.system(),
        "architecture": platform.machine(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": _memory_gib(),
        "gpu": _gpu_name(),
    }
    if hasattr(os, "getloadavg"):
        info["load_average_1min"] = round(os.getloadavg()[0], 2)
    return info


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Version of Python and of those of the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def write_result(name: str, payload: Mapping[str, Any], *, results: Path = RESULTS) -> Path:
    """Write `results/NAME.json` and return its path.

    `payload` must be JSON; its keys stand beside those that this function adds (`benchmark`,
    `command`, `date`, `commit`, `machine`, `versions`), which it must not use.
    """
    record: dict[str, Any] = {
        "benchmark": name,
        "command": _command_line(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": git_commit(),
        "machine": machine_info(),
        "versions": versions(),
    }
    clash = record.keys() & payload.keys()
    assert not clash, f"payload uses the reserved keys {sorted(clash)}"
    results.mkdir(parents=True, exist_ok=True)
    path = results / f"{name}.json"
    partial = path.with_suffix(".json.partial")
    partial.write_text(json.dumps({**record, **payload}, indent=1, allow_nan=False) + "\n")
    partial.replace(path)
    return path


def git_commit() -> str | None:
    """The commit checked out, with "+changes" if tracked files differ; None outside git."""
    commit = _output_of("git", "rev-parse", "HEAD")
    if commit is None:
        return None
    changed = _output_of("git", "status", "--porcelain", "--untracked-files=no")
    return commit + ("+changes" if changed else "")


def _command_line() -> str:
    """The script and its arguments; paths outside the repository are cut to their last part."""
    return shlex.join(["python", *(_portable(argument) for argument in sys.argv)])


def _portable(argument: str) -> str:
    key, equals, value = "", "", argument
    if argument.startswith("--") and "=" in argument:
        key, equals, value = argument.partition("=")
    if os.sep not in value:
        return argument
    path = Path(value).absolute()
    shown = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
    return key + equals + shown


def _output_of(*command: str) -> str | None:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _memory_gib() -> float | None:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)


def _gpu_name() -> str | None:
    if "torch" not in sys.modules:  # a benchmark that does not use torch need not load it
        return None
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
