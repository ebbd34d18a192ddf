"""Children: whether they run, are stopped or have ended, and that nothing of them is left."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rollpacker.workers.child import Child, children, state
from rollpacker.workers.output import MAX_OUTPUT_BYTES, Output, OutputQuota

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def python(source: str, *, guarded: bool, output: int | None = None) -> Child:
    return Child.start([sys.executable, "-c", source], "one", guarded=guarded, output=output)


def wait_for(condition: Callable[[], object], within_s: float = 60.0) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.01)
    return False


def is_alive(pid: int) -> bool:
    return state(pid) not in ("", "Z", "X")


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize(
    ("source", "how"),
    [
        ("", "exit status 0"),
        ("raise SystemExit(3)", "exit status 3"),
        ("raise SystemExit(-1)", "exit status 255"),
        ("import os; os.kill(os.getpid(), 9)", "signal 9, SIGKILL"),
        ("import os; os.kill(os.getpid(), 15)", "signal 15, SIGTERM"),
    ],
)
def test_how_a_child_ended(guarded: bool, source: str, how: str) -> None:
    child = python(source, guarded=guarded)
    assert child.how_ended(20.0) == how
    child.close()


@pytest.mark.parametrize("guarded", [False, True])
def test_a_child_is_stopped_killed_and_named(guarded: bool) -> None:
    child = python("import time; time.sleep(600)", guarded=guarded)
    if guarded:
        assert wait_for(lambda: children(child.process.pid))
        (child.pid,) = children(child.process.pid)
        score = Path(f"/proc/{child.pid}/oom_score_adj")
        assert wait_for(lambda: int(score.read_text()) >= 500), "it goes before its owner"
    assert child.how_ended() is None and not child.is_stopped()
    os.kill(child.pid, signal.SIGSTOP)
    assert wait_for(child.is_stopped)
    assert str(child) == f"one (pid {child.pid})"
    child.kill()
    assert child.how_ended(5.0) is not None
    assert wait_for(lambda: not is_alive(child.pid))
    child.close()
    child.close()


FAMILY = """
import os, signal, subprocess, sys, time
subprocess.Popen(["sleep", "600"])
subprocess.Popen(["sleep", "600"], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    os._exit(0)
os.wait()
open(sys.argv[1], "w").write("ready")
time.sleep(600)
"""


def family(pid: int) -> set[int]:
    found, level = set[int](), {pid}
    while level:
        level = {child for one in level for child in children(one)}
        found |= level
    return found


@pytest.mark.parametrize("ended_by", ["kill", "close", "gone", "the guardian's death"])
def test_a_guarded_child_leaves_no_descendant(tmp_path: Path, ended_by: str) -> None:
    command = [sys.executable, "-c", FAMILY, str(tmp_path / "ready")]
    child = Child.start(command, "family", guarded=True)
    assert wait_for((tmp_path / "ready").exists, 30)
    assert wait_for(lambda: len(family(child.process.pid)) == 4), "child, two sleeps, a daemon"
    found = family(child.process.pid)
    (child.pid,) = [pid for pid in children(child.process.pid) if children(pid)]
    match ended_by:
        case "kill":
            child.kill()
        case "close":
            child.close()
        case "gone":
            child.kill()
            assert asyncio.run(child.gone()) is not None
        case _:
            os.kill(child.process.pid, signal.SIGKILL)
            found = {child.pid}
    assert wait_for(lambda: not any(map(is_alive, found)))
    child.kill_by_force()
    child.close()
    for pid in family(os.getpid()):
        assert b"sleep\x00600" not in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_guarded_child_ends_with_an_owner_that_is_killed(tmp_path: Path) -> None:
    source = (
        "import sys, time\n"
        "from rollpacker.workers.child import Child\n"
        f"command = [sys.executable, '-c', {FAMILY!r}, {str(tmp_path / 'ready')!r}]\n"
        "child = Child.start(command, 'family', guarded=True)\n"
        "print(child.process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    guardian = int(owner.stdout.readline())
    assert wait_for((tmp_path / "ready").exists, 30)
    found = family(guardian) | {guardian}
    assert len(found) >= 4
    owner.kill()
    owner.wait()
    assert wait_for(lambda: not any(map(is_alive, found)))


def test_a_child_that_is_forgotten_ends() -> None:
    child = python("import time; time.sleep(600)", guarded=True)
    pid = child.process.pid
    del child
    assert wait_for(lambda: not is_alive(pid))


def test_what_a_child_prints_becomes_lines() -> None:
    heard: list[str] = []
    output = Output(OutputQuota(), heard.append)
    said = r"b'one\n\ntwo \xff\x1b[31m\n1%\r2%\r\na\tb\n' + b'x' * 5000 + b'\nlast'"
    source = f"import os; os.write(1, {said})"
    child = python(source, guarded=True, output=output.writer)
    os.close(output.writer)
    assert child.how_ended(20.0) == "exit status 0"
    output.close()
    child.close()
    assert heard == ["one", r"two \xff\x1b[31m", "2%", "a   b", "x" * 2000, "last"]


def test_output_has_a_quota_per_minute() -> None:
    now = 0.0
    quota = OutputQuota(lambda: now)
    assert quota.take(b"x" * (MAX_OUTPUT_BYTES - 1)) == b"x" * (MAX_OUTPUT_BYTES - 1)
    assert quota.take(b"abc") == b"a"
    assert quota.take(b"def") == b""
    now = 60.0
    assert quota.take(b"g") == b"\n[5 bytes of output were dropped]\ng"
    assert quota.take(b"h") == b"h"
