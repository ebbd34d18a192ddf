"""The state of processes, from /proc."""

from __future__ import annotations

from pathlib import Path


def state(pid: int) -> str:
    """The kernel's letter: R, S, D, T (stopped), t (traced), Z (ended)...; "" if there is none."""
    return (_fields(pid) or [""])[0]


def only_grandchild(pid: int) -> int:
    """Of bubblewrap, whose child is process 1 of its namespace: what it was told to start. Raises
    OSError if it is gone."""
    for _ in range(2):
        children = _children(pid)
        if len(children) != 1:
            raise OSError(f"process {pid} has {len(children)} children")
        (pid,) = children
    return pid


def waited_s(parent: int) -> float:
    """Seconds that the youngest child's first thread was ready to run and had no processor; 0 where
    the kernel does not say."""
    try:
        child = max(_children(parent), default=0)
        return int(Path(f"/proc/{child}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:  # gone, or a kernel without that file
        numbers = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
        return sorted(number for number in numbers if _fields(number)[1:2] == [str(pid)])
    return [int(word) for word in text.split()]


def _fields(pid: int) -> list[str]:
    """Those of /proc/PID/stat after the name: state, parent..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
