"""The sandbox protocol: a program goes in, bytes and a status come out. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol

from rollpacker.bounds import check_at_least, check_positive


class SandboxUnavailable(RuntimeError):
    """Nothing isolates untrusted programs on this machine. The message (at most ten lines) says
    what is missing, how to check it, and three cures."""


I_ACCEPT = "I accept that model-written code runs without isolation"
"""The sentence that `sandbox.allow_unsandboxed_code` must hold, word for word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxConfig:
    """The sandbox for untrusted programs (`sandbox.*`)."""

    backend: Literal["auto", "bwrap", "http"] = "auto"
    """What isolates the programs: bwrap (bubblewrap on this machine) or http (a service). auto:
    http if a url is set, else bwrap."""
    url: str | None = None
    """Address of a service that speaks SandboxFusion's protocol, such as http://host:8080. None:
    there is none. For backend http only."""
    token_env: str | None = None
    """Name of the environment variable with the bearer token. None: no token is sent. For backend
    http only."""
    memory_mb: int = 512
    """Memory of a whole run in MiB, with all its processes."""
    disk_mb: int = 64
    output_kb: int = 1024
    allow_unsandboxed_code: str | None = None
    """Permission to run programs as plain processes of your own user where nothing isolates them.
    Must be the sentence `I accept that model-written code runs without isolation`; every metric
    file is then marked. None: not permitted."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "memory_mb", "disk_mb", "output_kb")
        if self.backend == "http" and self.url is None:
            raise ValueError("backend http needs a url")
        if self.allow_unsandboxed_code not in (None, I_ACCEPT):
            raise ValueError(f'allow_unsandboxed_code must be exactly "{I_ACCEPT}"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The modules and packages that programs of one kind find in their interpreter. A caller with
    such programs makes a profile and passes it with every run. The sandbox keeps interpreters ready
    for each profile that it has met."""

    name: str
    """The profile's name in messages and in lists of processes."""
    packages: tuple[str, ...] = ()
    """Installed packages that programs may import, by import name. All others are hidden."""
    distributions: tuple[str, ...] = ()
    """Installed distributions whose metadata the packages in `packages` read."""
    folders: tuple[tuple[str, str], ...] = ()
    """Folders of modules that programs may import: pairs of dotted package name and path."""
    warm: tuple[str, ...] = ()
    """Modules that are imported, in this order, before a program arrives. The last may be a module
    of `folders` that prepares things for all programs of an interpreter."""
    is_cold: bool = False
    """Whether every run starts an interpreter of its own, which is slow, and forks none."""


PYTHON = Profile(
    name="python",
    warm=(
        *("bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "fractions"),
        *("functools", "heapq", "io", "itertools", "json", "math", "operator", "random", "re"),
        *("resource", "fcntl", "string", "threading", "traceback", "typing"),
    ),
)
"""The profile with the standard library, parts of which are loaded before a run is forked."""
COLD = Profile(name="cold", warm=("fcntl", "math", "resource"), is_cold=True)
"""The profile with the standard library in a new interpreter for each run."""
PROFILES = {profile.name: profile for profile in (PYTHON, COLD)}


def profile_of(profile: Profile | str) -> Profile:
    """The profile itself, or the built-in one of this name; else raises `ValueError`."""
    if isinstance(profile, Profile):
        return profile
    if profile not in PROFILES:
        raise ValueError(f"no sandbox profile {profile!r}; there are {', '.join(PROFILES)}")
    return PROFILES[profile]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one run of a program."""

    wall_s: float = 10.0
    """Most seconds that the run may take, enforced from outside."""
    cpu_s: float | None = None
    """Most seconds of processor time. None: the wall limit, rounded up to whole seconds, plus 1."""
    memory_bytes: int = 512 << 20
    """Most memory of all processes of the run together."""
    output_bytes: int = 1 << 20
    """Most bytes of stdout, and of stderr. A run that writes more is ended."""
    disk_bytes: int = 64 << 20
    """Most bytes of files in the run's temporary folder, the only place where it can write."""
    max_files: int = 1024

    def __post_init__(self) -> None:
        check_positive(self, "wall_s", "cpu_s")
        check_at_least(self, 1, "memory_bytes", "output_bytes", "disk_bytes", "max_files")


class Status(StrEnum):
    """How a run ended. No status says that the program's answer is right."""

    OK = "ok"
    """The program exited with status 0, which a wrong program can do, too."""
    NONZERO = "nonzero"
    TIMEOUT = "timeout"
    """The run exceeded its wall or processor time."""
    MEMORY = "memory"
    OUTPUT = "output"
    """The program wrote more output than it may."""
    KILLED = "killed"
    """The program was ended by a signal that it caused itself."""
    SANDBOX_ERROR = "sandbox_error"
    """The sandbox failed, which says nothing about the program. Run it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The result of a run. The program may have forged all but status, times and sizes."""

    status: Status
    exit_code: int | None = None
    """The exit status. None: the program did not exit by itself."""
    stdout: bytes = b""
    stderr: bytes = b""
    truncated: bool = False
    """Whether stdout or stderr was cut off at the limit on output."""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_memory_bytes: int = 0
    detail: str = ""
    """For the status `sandbox_error`: what failed, in which worker. Otherwise empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend can do on this machine, and which attacks its self-test found contained."""

    backend: str
    passed: tuple[str, ...] = ()
    """Names of the self-test's attacks that were contained. Empty before the self-test."""
    failed: tuple[str, ...] = ()
    """Names of the self-test's attacks that were not contained."""
    profiles: tuple[str, ...] = tuple(PROFILES)
    """Names of the built-in profiles, which every backend has."""
    memory: str
    """What limits the memory of a whole run: "cgroup v2", "cgroup v1", "no fork" (programs cannot
    start processes, so the limit of one process does), or a phrase of another backend."""
    can_fork: bool
    """Whether programs may start processes. With bwrap they may only if the memory of all is
    limited together."""
    seconds: float = 0.0
    """Duration of the self-test in seconds."""


class Sandbox(Protocol):
    """A pool of workers that run programs. Any number of runs may be requested at once; those
    beyond the number of workers wait, and waiting does not count as time of the run."""

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
        """Run a Python program to its end or to a limit. `files` (contents by relative name) are
        put into its working folder. Profiles: "python" (standard library, forked from a warm
        interpreter), "cold" (the same in a new interpreter), or a profile of the caller's. Nothing
        that the program does raises an error; `ValueError` is raised for a profile that cannot be
        used here, or a file name that leads out of the folder. Cancelling the call ends the run."""
        ...

    async def lacks(self, profile: Profile) -> str:
        """A sentence with packages of the profile that programs cannot import; else empty."""
        ...

    async def close(self) -> None:
        """End all workers of the sandbox."""
        ...
