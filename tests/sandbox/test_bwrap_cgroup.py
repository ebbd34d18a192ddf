"""Where control groups can be made, and that those of dead owners go."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollpacker.sandbox import cgroup

V1 = """\
30 23 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw
31 30 0:27 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
32 30 0:28 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
33 30 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
"""
V2 = "40 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
CONTAINER = "41 23 0:26 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup2 rw\n"


@pytest.mark.parametrize(
    ("mounts", "groups", "expected"),
    [
        (
            V1,
            "4:memory:/user/x\n2:cpu,cpuacct:/\n0::/\n",
            {
                "memory": "memory/user/x",
                "cpu": "cpu,cpuacct",
                "cpuacct": "cpu,cpuacct",
                "": "unified",
            },
        ),
        (V2, "0::/user.slice/run-7.scope\n", {"": "user.slice/run-7.scope"}),
        (CONTAINER, "0::/docker/abc/job\n", {"": "job"}),
        (CONTAINER, "0::/docker/abcdef\n", {}),
        ("", "0::/\n", {}),
    ],
)
def test_own_groups(tmp_path: Path, mounts: str, groups: str, expected: dict[str, str]) -> None:
    (tmp_path / "cgroup").write_text(groups)
    (tmp_path / "mountinfo").write_text(mounts)
    found = cgroup.own_groups(tmp_path / "cgroup", tmp_path / "mountinfo")
    assert found == {name: Path("/sys/fs/cgroup", path) for name, path in expected.items()}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="NOT TESTED: needs /proc")
def test_groups_of_dead_owners_are_swept(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait()
    namespace = os.stat("/proc/self/ns/pid").st_ino
    dead = tmp_path / f"rollpacker-{namespace}-{gone.pid}-123-python-1"
    reused = tmp_path / f"rollpacker-{namespace}-{os.getpid()}-1-python-1"
    elsewhere = tmp_path / f"rollpacker-{namespace + 1}-{gone.pid}-123-python-1"
    own, other = tmp_path / cgroup._name("python-1"), tmp_path / "other"
    for folder in (dead, reused, elsewhere, own, other):
        folder.mkdir()
    cgroup.sweep(cgroup.Place(1, tmp_path, None))
    assert sorted(tmp_path.iterdir()) == sorted([elsewhere, own, other])
