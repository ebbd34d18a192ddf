"""The sandbox protocol: a program in, bytes and a status out. Light."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from rollpacker.rewards.base import RewardError


class SandboxUnavailable(RewardError):
    """Nothing here isolates untrusted programs. The message (at most ten lines) says what is
    missing, how to check it, and three cures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one run."""

    wall_s: float = 10.0
    """Enforced from outside."""
    cpu_s: float | None = None
    """None: the wall limit, rounded up to whole seconds, plus 1."""
    memory_bytes: int = 512 << 20
    """Of all processes of the run together."""
    output_bytes: int = 1 << 20
    """Kept of stdout, and of stderr; a run that writes more is ended."""
    disk_bytes: int = 64 << 20
    """Files in the run's own temporary folder, its only writable place."""
    max_files: int = 1024

    def __post_init__(self) -> None:
        if not (math.isfinite(self.wall_s) and self.wall_s > 0):
            raise ValueError(f"wall_s must be more than 0, not {self.wall_s}")
        if self.cpu_s is not None and not self.cpu_s > 0:
            raise ValueError(f"cpu_s must be more than 0, not {self.cpu_s}")
        for name in ("memory_bytes", "output_bytes", "disk_bytes", "max_files"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")


class Status(StrEnum):
    """How a run ended. None of them says that its answer is right."""

    OK = "ok"
    """Exit status 0, which a program can choose."""
    NONZERO = "nonzero"
    TIMEOUT = "timeout"
    """Wall or processor time."""
    MEMORY = "memory"
    OUTPUT = "output"
    """Wrote more than it may."""
    KILLED = "killed"
    """By a signal of its own doing."""
    SANDBOX_ERROR = "sandbox_error"
    """The sandbox failed, not the program: retried, and never a reward, not even 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What came out of one run. All of it may be forged by the program, but for status, times
    and sizes."""

    status: Status
    exit_code: int | None = None
    """None if it did not exit by itself."""
    stdout: bytes = b""
    stderr: bytes = b""
    truncated: bool = False
    """Output was cut off."""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_memory_bytes: int = 0
    detail: str = ""
    """For `sandbox_error`: what failed, and which worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend was seen to enforce on this machine, by its self-test."""

    backend: str
    passed: tuple[str, ...]
    """Names of the canary attacks that were contained."""
    failed: tuple[str, ...]
    profiles: tuple[str, ...]
    memory: str
    """How the memory of a whole run is bounded: "cgroup v2", "cgroup v1" or "no fork"."""
    can_fork: bool
    """Programs may start processes (only where their memory is bounded together)."""
    seconds: float
    """The self-test took so long."""


class Sandbox(Protocol):
    """A pool of workers. Any number of runs may be asked for at the same time; those beyond the
    number of workers wait, and waiting does not count as time of the run."""

    capabilities: Capabilities

    async def run(
        self,
        program: str,
        *,
        stdin: str | bytes = b"",
        files: Mapping[str, str | bytes] | None = None,
        limits: Limits | None = None,
        profile: str = "python",
    ) -> RunResult:
        """Run a Python program to its end or limit. `files` (relative names) are put into its
        working folder. Profiles: "python" (standard library, forked from a warm interpreter),
        "cold" (the same in a new interpreter), "math" (sympy and math-verify imported already).
        Never raises for what the program does; raises `ValueError` for an unknown profile or a
        file name that leaves the folder. Cancelling the call ends the run."""
        ...

    async def close(self) -> None:
        """End every worker; nothing is left behind."""
        ...
