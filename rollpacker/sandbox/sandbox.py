"""The sandbox protocol: a program in, bytes and a status out. Light."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol


class SandboxUnavailable(RuntimeError):
    """Nothing here isolates untrusted programs. The message (at most ten lines) says what is
    missing, how to check it, and three cures."""


I_ACCEPT = "I accept that model-written code runs without isolation"
"""The sentence that `sandbox.allow_unsandboxed_code` must hold, word by word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxConfig:
    """The sandbox for untrusted programs (`sandbox.*`)."""

    backend: Literal["auto", "bwrap", "http"] = "auto"
    """The backend. auto: http if a url is set, else bwrap."""
    url: str | None = None
    """http only: address of a service that speaks SandboxFusion's protocol, such as
    http://host:8080."""
    token_env: str | None = None
    """http only: the environment variable that holds the bearer token."""
    memory_mb: int = 512
    """Memory of a whole run in MiB, children included."""
    disk_mb: int = 64
    output_kb: int = 1024
    allow_unsandboxed_code: str | None = None
    """Run programs as plain processes of your own user where nothing isolates them. Must be the
    sentence `I accept that model-written code runs without isolation`; every metric file is then
    marked."""

    def __post_init__(self) -> None:
        for name in ("memory_mb", "disk_mb", "output_kb"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.backend == "http" and self.url is None:
            raise ValueError("backend http needs a url")
        if self.allow_unsandboxed_code not in (None, I_ACCEPT):
            raise ValueError(f'allow_unsandboxed_code must be exactly "{I_ACCEPT}"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Modules and packages that programs of one kind find in their interpreter.

    Whoever has such programs makes one and gives it with every run. The sandbox keeps interpreters
    for each profile that it has met.
    """

    name: str
    """The profile's name in messages and in lists of processes."""
    packages: tuple[str, ...] = ()
    """Installed packages that programs may import, by import name. All others are hidden."""
    distributions: tuple[str, ...] = ()
    """Installed distributions whose metadata these packages ask for."""
    folders: tuple[tuple[str, str], ...] = ()
    """Folders of modules that programs may import: a dotted package name, and the path here."""
    warm: tuple[str, ...] = ()
    """Modules that are imported, in this order, before any program comes. The last may be one of
    the folders' that does more to get ready: it is run once for each interpreter, not for each
    program."""
    is_cold: bool = False
    """A new interpreter is started for every run, instead of a copy of one that is ready."""


PYTHON = Profile(
    name="python",
    warm=(
        *("bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "fractions"),
        *("functools", "heapq", "io", "itertools", "json", "math", "operator", "random", "re"),
        *("resource", "fcntl", "string", "threading", "traceback", "typing"),
    ),
)
"""The standard library."""
COLD = Profile(name="cold", warm=("fcntl", "math", "resource"), is_cold=True)
"""The standard library in a new interpreter for each run."""
PROFILES = {profile.name: profile for profile in (PYTHON, COLD)}


def profile_of(profile: Profile | str) -> Profile:
    """The profile itself, or the built-in one of that name. Raises `ValueError`."""
    if isinstance(profile, Profile):
        return profile
    if profile not in PROFILES:
        raise ValueError(f"no sandbox profile {profile!r}; there are {', '.join(PROFILES)}")
    return PROFILES[profile]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one run."""

    wall_s: float = 10.0
    """Seconds that the run may take, enforced from outside."""
    cpu_s: float | None = None
    """Seconds of processor time. None: the wall limit, rounded up to whole seconds, plus 1."""
    memory_bytes: int = 512 << 20
    """Memory of all processes of the run together."""
    output_bytes: int = 1 << 20
    """Bytes that are kept of stdout, and of stderr; a run that writes more is ended."""
    disk_bytes: int = 64 << 20
    """Bytes of files in the run's own temporary folder, its only writable place."""
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
    """The program exited with status 0, which it can choose."""
    NONZERO = "nonzero"
    TIMEOUT = "timeout"
    """The program ran out of wall or processor time."""
    MEMORY = "memory"
    OUTPUT = "output"
    """The program wrote more than it may."""
    KILLED = "killed"
    """Ended by a signal that the program itself caused."""
    SANDBOX_ERROR = "sandbox_error"
    """The sandbox failed, not the program, of which this says nothing: ask again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The result of one run. The program may have forged all of it but status, times and sizes."""

    status: Status
    exit_code: int | None = None
    """The exit status. None: the program did not exit by itself."""
    stdout: bytes = b""
    stderr: bytes = b""
    truncated: bool = False
    """Whether output was cut off."""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_memory_bytes: int = 0
    detail: str = ""
    """For a `sandbox_error`: what failed, and which worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Limits that a backend was seen to enforce on this machine, by its self-test."""

    backend: str
    passed: tuple[str, ...] = ()
    """Names of the canary attacks that were contained; empty before the self-test."""
    failed: tuple[str, ...] = ()
    """Names of the canary attacks that were not contained."""
    profiles: tuple[str, ...] = tuple(PROFILES)
    """Names of the profiles that every backend has."""
    memory: str
    """The bound on the memory of a whole run: "cgroup v2", "cgroup v1" or "no fork"."""
    can_fork: bool
    """Whether programs may start processes, which they may only where their memory is bounded
    together."""
    seconds: float = 0.0
    """Seconds that the self-test took."""


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
        profile: Profile | str = "python",
    ) -> RunResult:
        """Run a Python program to its end or limit. `files` (relative names) are put into its
        working folder. Profiles: "python" (standard library, forked from a warm interpreter),
        "cold" (the same in a new interpreter), or one of the caller's own. Never raises for what
        the program does; raises `ValueError` for a profile that cannot be used here or a file name
        that leaves the folder. Cancelling the call ends the run."""
        ...

    async def lacks(self, profile: Profile) -> str:
        """The packages that programs of this profile lack here, in words; "" if none is missing."""
        ...

    async def close(self) -> None:
        """End every worker; nothing is left behind."""
        ...
