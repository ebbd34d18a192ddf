"""Where control groups can be made, and that those of dead owners go."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollpacker.sandbox import Limits, RunResult, Status, cgroup, open_sandbox, zygote
from rollpacker.sandbox.pool import result_of
from rollpacker.sandbox.zygote_process import Reply
from tests.sandbox.test_bwrap import needs_bwrap, one

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


def memory_is_bounded() -> bool:
    return cgroup.find_place() is not None


GREEDY = """
import os, sys
for entrance in sys.argv[1:]:
    os.write(int(entrance), b"0")
print("entered", flush=True)
input()
block = bytearray(256 << 20)
block[::4096] = b"1" * len(block[::4096])
print("holds", flush=True)
input()
"""


@pytest.mark.skipif(not memory_is_bounded(), reason="NOT TESTED: no control groups to be made here")
def test_a_run_answers_for_no_process_that_the_kernel_ended_before_it() -> None:
    async def runs() -> list[bool]:
        place = cgroup.find_place()
        assert place is not None
        group = cgroup.Group(place, "test", 64)
        short = []
        for late in (False, True):
            process = subprocess.Popen(
                [sys.executable, "-c", GREEDY, *map(str, group.entrances)],
                pass_fds=group.entrances,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            assert process.stdin is not None and process.stdout is not None
            group.begin(64 << 20)
            assert process.stdout.readline() == b"entered\n"
            if late:  # the answer came before the process had met its end
                group.end()
            process.stdin.write(b"\n")
            process.stdin.flush()
            assert process.wait(timeout=60) == -9
            if not late:
                short.append(group.end()[0])
            group.begin(64 << 20)
            short.append(group.end()[0])
            process.stdin.close()
            process.stdout.close()
        await group.close()
        return short

    assert asyncio.run(runs()) == [True, False, False]


@pytest.mark.skipif(not memory_is_bounded(), reason="NOT TESTED: no control groups to be made here")
def test_a_run_waits_for_the_memory_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "_SETTLE_LIMIT_S", 60.0)

    async def waited() -> bool:
        place = cgroup.find_place()
        assert place is not None
        group = cgroup.Group(place, "test", 64)
        await group.settle()
        group.begin(1 << 30)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", GREEDY, *map(str, group.entrances)),
            pass_fds=group.entrances,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdin is not None and process.stdout is not None
        assert await process.stdout.readline() == b"entered\n"
        process.stdin.write(b"\n")
        assert await process.stdout.readline() == b"holds\n"
        group.begin(400 << 20)
        waiting = asyncio.ensure_future(group.settle())
        await asyncio.sleep(0.02)
        is_waiting = not waiting.done()
        process.kill()
        await process.wait()
        await waiting
        await group.close()
        return is_waiting

    assert asyncio.run(waited())


MANY_SESSIONS = """
import os
for _ in range(110):
    if os.fork() == 0:
        try:
            os.setsid()
        except OSError:
            pass
        while True:
            pass
while True:
    pass
"""
WORKS = """
import time
while time.process_time() < 0.3:
    pass
print("right")
"""


def beside(hog: str, honest: str) -> RunResult:
    """How an honest program ends beside the other. Without its share it would not end in any of
    three tries; a machine that had no time for it has some at another."""
    for _ in range(3):
        result = asyncio.run(started_beside(hog, honest))
        if result.status is Status.OK:
            break
    return result


async def started_beside(hog: str, honest: str) -> RunResult:
    """It starts when the other has begun to take what it can."""
    async with open_sandbox("bwrap", workers=2) as box:
        await box.run("")
        hogging = asyncio.create_task(box.run(hog, limits=Limits(wall_s=8.0)))
        await asyncio.sleep(0.5)
        try:
            return await box.run(honest, limits=Limits(wall_s=6.0))
        finally:
            hogging.cancel()


@needs_bwrap
def test_a_program_cannot_take_the_processors_from_those_beside_it() -> None:
    """In GRPO a response gains by its siblings' loss. It has one share, however many processes."""
    place = cgroup.find_place()
    if place is None or place.cpu is None:
        pytest.skip("NOT TESTED: no control groups that share out the processors")
    result = beside(MANY_SESSIONS, WORKS)
    assert (result.status, result.stdout) == (Status.OK, b"right\n")


@needs_bwrap
def test_nor_without_shares_of_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the kernel shares them out by session, and a program cannot leave its own."""
    place = cgroup.find_place()
    autogroups = Path("/proc/sys/kernel/sched_autogroup_enabled")
    in_root = "cpu:/\n" in Path("/proc/self/cgroup").read_text().replace(",cpuacct", "")
    if place is None or not in_root or not autogroups.exists() or "1" not in autogroups.read_text():
        pytest.skip("NOT TESTED: no control groups, or no autogroups")
    bounds_memory_alone = dataclasses.replace(place, cpu=None)
    monkeypatch.setattr(cgroup, "find_place", lambda: bounds_memory_alone)
    result = beside(MANY_SESSIONS, WORKS)
    assert (result.status, result.stdout) == (Status.OK, b"right\n")


def timed_out(*, waited_share: float, cpu_s: float) -> Status:
    reply = Reply(
        how=zygote.TIMED_OUT,
        exit_code=-1,
        signal=9,
        wall_s=4.0,
        cpu_s=cpu_s,
        peak_bytes=0,
        stdout=b"",
        stderr=b"",
        waited_share=waited_share,
    )
    return result_of(reply, Limits()).status


def test_a_run_that_had_no_processor_has_no_verdict() -> None:
    assert timed_out(waited_share=0.95, cpu_s=0.1) is Status.SANDBOX_ERROR
    assert timed_out(waited_share=0.5, cpu_s=2.0) is Status.TIMEOUT
    assert timed_out(waited_share=0.0, cpu_s=0.0) is Status.TIMEOUT  # it slept
    # Its own threads took the processors from its first: no way out of a zero.
    assert timed_out(waited_share=0.95, cpu_s=4.0) is Status.TIMEOUT


@needs_bwrap
@pytest.mark.skipif(not memory_is_bounded(), reason="NOT TESTED: no control groups")
def test_children_that_meet_the_memory_limit_end_the_run_as_that() -> None:
    program = """
import os
for _ in range(3):
    if os.fork() == 0:
        block = bytearray(b"x") * (100 << 20)
        os._exit(0)
for _ in range(3):
    os.wait()
print("right")
"""
    result = one(program, limits=Limits(wall_s=20.0, memory_bytes=128 << 20))
    assert result.status is Status.MEMORY and result.exit_code is None
