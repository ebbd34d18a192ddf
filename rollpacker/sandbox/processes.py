"""The zygote below bubblewrap, and how its run fares, from /proc."""

from __future__ import annotations

from pathlib import Path

from rollpacker.workers.child import children as children_of


def only_grandchild(pid: int) -> int:
    """Of bubblewrap, whose child is process 1 of its namespace: what it was told to start. Raises
    OSError if it is gone."""
    for _ in range(2):
        children = children_of(pid)
        if len(children) != 1:
            raise OSError(f"process {pid} has {len(children)} children")
        (pid,) = children
    return pid


def waited_s(parent: int) -> float:
    """Seconds that the youngest child's first thread was ready to run and had no processor; 0 where
    the kernel does not say."""
    try:
        child = max(children_of(parent), default=0)
        return int(Path(f"/proc/{child}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0
