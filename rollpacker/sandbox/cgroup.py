"""Control groups: a limit on memory and number of tasks for all processes of a run together, and
one share of the processors for all of them.

Every worker has a group of its own. The worker's zygote (the process that forks its runs) stays
outside; a run enters the group, by descriptors that were opened here, before it gives up its
rights. Groups must be allowed somewhere: in version 2 below (or beside) this process's own group,
with the memory controller; in version 1 below its own groups. Groups are named after their owner,
and those of dead owners are removed by the next process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "rollpacker"
_NUMBERS = itertools.count()
_REMOVE_LIMIT_S = 2.0
_SETTLE_LIMIT_S = 1.0


@dataclass(frozen=True, slots=True)
class Place:
    """The folders of the kernel's file system in which control groups can be made."""

    version: int
    memory: Path
    tasks: Path | None
    """Folder of the controller "pids"; in version 2 it is the same as `memory`. None: there is no
    such controller."""
    cpu: Path | None = None
    """Folder of the controller "cpu". None: there is no such controller. By default a group there
    has the same weight as one ordinary process beside it."""

    @property
    def folders(self) -> tuple[Path, ...]:
        found = (self.memory, self.tasks, self.cpu)
        return tuple(dict.fromkeys(folder for folder in found if folder is not None))


def find_place() -> Place | None:
    """Find where control groups can be made, by making one. None: this process may not make any, or
    there is no memory controller."""
    groups = own_groups(Path("/proc/self/cgroup"), Path("/proc/self/mountinfo"))
    unified = groups.get("")
    if unified is not None:
        # Refused where processes sit in the group itself, as this one does; then its parent may do.
        for wanted in ("+memory +pids", "+cpu"):  # all or nothing of what is written at once
            with contextlib.suppress(OSError):
                (unified / "cgroup.subtree_control").write_text(wanted)
        for folder in (unified, unified.parent):
            controllers = _controllers_of_a_child(folder)
            if "memory" in controllers:
                tasks, cpu = (folder if name in controllers else None for name in ("pids", "cpu"))
                return Place(2, folder, tasks, cpu)
    memory = groups.get("memory")
    if memory is not None and _can_make(memory, "memory.oom_control"):
        found = [
            folder if folder is not None and _can_make(folder, needed) else None
            for folder, needed in (
                (groups.get("pids"), "pids.max"),
                (groups.get("cpu"), "cpu.shares"),
            )
        ]
        return Place(1, memory, *found)
    return None


def own_groups(cgroup: Path, mountinfo: Path) -> dict[str, Path]:
    """Folders of this process's own control groups, by controller; the key "" is version 2."""
    mounts: dict[str, tuple[str, str]] = {}
    for line in _lines(mountinfo):
        before, _, after = line.partition(" - ")
        _, _, _, root, point, *_ = before.split(" ")
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2":
            mounts[""] = (root, point)
        elif kind == "cgroup":
            mounts |= dict.fromkeys(options.split(","), (root, point))
    found = {}
    for line in _lines(cgroup):
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            root, point = mounts.get(name, ("", ""))
            if point and (path + "/").startswith(root.rstrip("/") + "/"):
                found[name] = Path(point, path[len(root.rstrip("/")) :].lstrip("/"))
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _controllers_of_a_child(folder: Path) -> set[str]:
    """The controllers that a new group below a version 2 folder has. Empty if no group can be made
    there, or none can be entered."""
    trial = folder / _name("trial")
    try:
        trial.mkdir()
    except OSError:
        return set()
    try:
        controllers = set((trial / "cgroup.controllers").read_text().split())
        return controllers if _may_enter(trial) else set()
    except OSError:
        return set()
    finally:
        trial.rmdir()


def _may_enter(group: Path) -> bool:
    """Whether processes may enter the control group. This is tried with a process, since in version
    2 it depends on the groups above."""
    pid = os.posix_spawn("/bin/sleep", ["sleep", "5"], {})
    try:
        (group / "cgroup.procs").write_text(str(pid))
    except OSError:
        return False
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    return True


def _can_make(folder: Path, needed: str) -> bool:
    trial = folder / _name("trial")
    try:
        trial.mkdir()
    except OSError:
        return False
    try:
        return os.access(trial / needed, os.W_OK)
    finally:
        trial.rmdir()


def _owner() -> str:
    return f"{_pid_namespace()}-{os.getpid()}-{_started(os.getpid())}"


def _name(what: str) -> str:
    return f"{_PREFIX}-{_owner()}-{what}"


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _started(pid: int) -> str:
    """Start time of a process in clock ticks after boot; empty if there is no such process."""
    text = "".join(_lines(Path(f"/proc/{pid}/stat")))
    return text.rpartition(")")[2].split()[19] if text else ""


def sweep(place: Place) -> None:
    """Remove the control groups in `place` whose owners (processes of this program) have ended."""
    pattern = re.compile(rf"{_PREFIX}-{_pid_namespace()}-(\d+)-(\d+)-")
    for folder in place.folders:
        for group in folder.glob(f"{_PREFIX}-*"):
            match = pattern.match(group.name)
            if match and _started(int(match[1])) != match[2]:
                with contextlib.suppress(OSError):
                    group.rmdir()


class Group:
    """The control group of one worker, whose runs enter the group one after the other."""

    def __init__(self, place: Place, name: str, max_tasks: int) -> None:
        """Makes the group `name`, for at most `max_tasks` tasks. Raises `OSError`."""
        self._version = place.version
        unique = f"{next(_NUMBERS)}-{name}"  # this process may have several pools
        own = _name(unique)
        self._folders = [folder / own for folder in place.folders]
        self._memory = place.memory / own
        self.counts_tasks = place.tasks is not None
        self._limit = 0
        for folder in self._folders:
            folder.mkdir()
        if place.tasks is not None:
            (place.tasks / own / "pids.max").write_text(str(max_tasks))
        self.entrances = [os.open(path / "cgroup.procs", os.O_WRONLY) for path in self._folders]
        """Descriptors through which a process enters the group: it writes "0" to all of them."""
        events = "memory.events" if place.version == 2 else "memory.oom_control"
        self._events = os.open(self._memory / events, os.O_RDONLY)
        self._peak = -1
        if place.version == 1:
            self._peak = os.open(self._memory / "memory.max_usage_in_bytes", os.O_RDWR)
        self._num_killed = 0
        """Number of processes that the kernel had killed for lack of memory before the run."""

    async def settle(self) -> None:
        """Wait, before a run, until the memory of the run before is no longer counted in the group.
        Else the kernel might kill the next run's process for it. (Who reads about a process in
        /proc keeps its memory beyond its end.)"""
        usage = self._memory / ("memory.current" if self._version == 2 else "memory.usage_in_bytes")
        until = asyncio.get_running_loop().time() + _SETTLE_LIMIT_S
        while self._limit and int(usage.read_text()) > self._limit // 2:
            if asyncio.get_running_loop().time() > until:
                break
            await asyncio.sleep(0.001)

    def begin(self, memory_bytes: int) -> None:
        """Set the group's memory limit for a run that is about to begin. Raises OSError."""
        if memory_bytes != self._limit:
            if self._version == 2:
                self._write("memory.max", memory_bytes)
                self._write("memory.swap.max", 0)
            else:
                self._write("memory.memsw.limit_in_bytes", -1)
                self._write("memory.limit_in_bytes", memory_bytes)
                self._write("memory.memsw.limit_in_bytes", memory_bytes)
            self._limit = memory_bytes
        if self._peak >= 0:
            os.pwrite(self._peak, b"0", 0)
        self._num_killed = self._count_killed()

    def _write(self, name: str, value: int) -> None:
        """Write a limit of the group. If the kernel has no such file, nothing happens."""
        with contextlib.suppress(FileNotFoundError):
            (self._memory / name).write_text(str(value))

    def end(self) -> tuple[bool, int]:
        """Return whether the kernel killed processes of the run for memory, and the run's peak in
        bytes (0: unknown). Called after a run."""
        peak = int(os.pread(self._peak, 32, 0)) if self._peak >= 0 else 0
        return self._count_killed() > self._num_killed, peak

    def _count_killed(self) -> int:
        match = re.search(rb"^oom_kill (\d+)", os.pread(self._events, 4096, 0), re.MULTILINE)
        return int(match[1]) if match else 0

    async def close(self) -> None:
        """Remove the control group, once the processes in it have ended."""
        for fd in (*self.entrances, self._events, self._peak):
            if fd >= 0:
                os.close(fd)
        until = asyncio.get_running_loop().time() + _REMOVE_LIMIT_S
        for folder in self._folders:
            while True:
                try:
                    folder.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError:
                    if asyncio.get_running_loop().time() > until:
                        break
                    await asyncio.sleep(0.01)
