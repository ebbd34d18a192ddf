"""Jobs as processes of this host: started once, found again, ended with all that they started."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollpacker.cluster.decide.nodes import Node
from rollpacker.cluster.service import keeper
from rollpacker.cluster.service.local_runner import ENDING, ROLLOUT_NODES, LocalRunner
from rollpacker.cluster.service.runner import JobOrder
from rollpacker.workers.child import state

FAMILY = """
import os, subprocess, sys, time
own = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(1000)"
far = [sys.executable, "-c", own, "far"]
subprocess.Popen(far, start_new_session=True)
env = {k: v for k, v in os.environ.items() if k == "PATH"}
bare = [sys.executable, "-c", own, "bare"]
subprocess.Popen(bare, start_new_session=True, env=env)
orphan = f"import subprocess; subprocess.Popen({[sys.executable, '-c', own, 'orphan']!r})"
subprocess.run([sys.executable, "-c", orphan])
while not all(os.path.exists(n) and open(n).read() for n in ("far", "bare", "orphan")):
    time.sleep(0.01)
open("ready", "w").close()
"""
"""A child in a session of its own, one without the job's environment, and an orphan."""
LASTS = FAMILY + "time.sleep(1000)\n"
LAST_THREAD = """
import ctypes, fcntl, platform, threading, time
device = open("device", "w")
fcntl.flock(device, fcntl.LOCK_EX)
threading.Thread(target=time.sleep, args=(1000,)).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
"""
"""Its first thread ends, by the kernel's `exit`; the second one has the device still."""

HOLDS = """
import fcntl, time
device = open("device", "w")
fcntl.flock(device, fcntl.LOCK_EX)
time.sleep(1000)
"""


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[LocalRunner]:
    runner = LocalRunner(tmp_path)
    yield runner
    runner.kill("job", 1)


def order(tmp_path: Path, code: str, incarnation: int = 1) -> JobOrder:
    return JobOrder(
        job="job",
        incarnation=incarnation,
        command=[sys.executable, "-c", code],
        environ={"COLOUR": "red"},
        folder=str(tmp_path),
        rollout_nodes=[Node("cheap", 0), Node("cheap", 2)],
        train_nodes=[Node("fast", 1)],
    )


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + 120.0
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def code_of(runner: LocalRunner, incarnation: int = 1) -> int:
    until(lambda: runner.ended("job", incarnation) is not None)
    code = runner.ended("job", incarnation)
    assert code is not None
    return code


def family(tmp_path: Path) -> list[int]:
    until((tmp_path / "ready").exists)
    place = tmp_path / "jobs" / "job" / "1"
    until((place / "process").exists)  # the keeper's, which may be later
    names = [tmp_path / name for name in ("far", "bare", "orphan")]
    return [int(path.read_text()) for path in (*names, place / "process", place / "keeper")]


def is_gone(pid: int) -> bool:
    return state(pid) in ("", "Z")


def test_a_job_runs_with_its_environment_and_ends_with_a_code(
    runner: LocalRunner, tmp_path: Path
) -> None:
    assert runner.ended("job", 1) == -1
    code = f"import os; print(os.environ['COLOUR'], os.environ['{ROLLOUT_NODES}'], os.getcwd())"
    runner.start(order(tmp_path, f"{code}; raise SystemExit(7)"))
    assert code_of(runner) == 7
    assert runner.last_lines("job") == f"red cheap/0,cheap/2 {tmp_path}\n"
    assert runner.last_lines("nobody") == ""
    runner.start(order(tmp_path, "import os; os.kill(os.getpid(), 9)", 2))
    assert code_of(runner, 2) == -9
    assert LocalRunner(tmp_path).ended("job", 1) == 7


def test_one_start_is_made_once_whoever_makes_it(runner: LocalRunner, tmp_path: Path) -> None:
    one = order(tmp_path, "open('starts', 'a').write('x'); import time; time.sleep(0.5)")
    for again in (runner, LocalRunner(tmp_path), runner):
        again.start(one)
    assert code_of(runner) == 0
    runner.start(one)
    assert (tmp_path / "starts").read_text() == "x"


def test_it_outlives_who_started_it(runner: LocalRunner, tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from rollpacker.cluster.service.local_runner import *\n"
        "runner = LocalRunner(Path(sys.argv[1]))\n"
        "runner.start(JobOrder(job='job', incarnation=1, command=['sleep', '1000'], environ={}, "
        "folder=sys.argv[1], rollout_nodes=[], train_nodes=[]))\n"
        "print('started', flush=True); import time; time.sleep(1000)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as service:
        assert service.stdout is not None and service.stdout.readline() == "started\n"
        service.kill()
    assert runner.ended("job", 1) is None
    runner.kill("job", 1)
    assert runner.ended("job", 1) == -9


def test_all_that_it_started_is_gone_when_it_was_killed(
    runner: LocalRunner, tmp_path: Path
) -> None:
    runner.start(order(tmp_path, LASTS))
    found = family(tmp_path)
    os.kill(found[3], signal.SIGSTOP)
    assert not any(map(is_gone, found))
    runner.kill("job", 2)  # another start
    assert not any(map(is_gone, found))
    runner.kill("job", 1)
    assert all(map(is_gone, found))
    assert runner.ended("job", 1) == -9


def test_a_job_is_gone_when_its_last_thread_is_not_its_first(
    runner: LocalRunner, tmp_path: Path
) -> None:
    runner.start(order(tmp_path, LAST_THREAD))
    device = tmp_path / "device"
    process = tmp_path / "jobs" / "job" / "1" / "process"
    until(lambda: process.exists() and state(int(process.read_text())) == "Z")
    assert is_locked(device)
    runner.kill("job", 1)
    assert not is_locked(device)


def test_a_kill_goes_on_where_another_one_ended(runner: LocalRunner, tmp_path: Path) -> None:
    """Who is ending has lost its mark already: it is known by what the first kill wrote."""
    holder = subprocess.Popen([sys.executable, "-c", HOLDS], cwd=tmp_path, env={})
    device = tmp_path / "device"
    until(lambda: device.exists() and is_locked(device))
    place = tmp_path / "jobs" / "job" / "1"
    place.mkdir(parents=True)
    began = (Path("/proc") / str(holder.pid) / "stat").read_text().rpartition(")")[2].split()[19]
    (place / ENDING).write_text(json.dumps({holder.pid: [1, began]}))
    threading.Thread(target=holder.wait).start()
    assert runner.ended("job", 1) == -1
    assert not is_locked(device) and not (place / ENDING).exists()


def test_a_full_disk_lets_nobody_live_who_is_killed(
    runner: LocalRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner.start(order(tmp_path, LASTS))
    processes = family(tmp_path)
    own_keeper = int((tmp_path / "jobs" / "job" / "1" / keeper.KEEPER).read_text())
    os.kill(own_keeper, signal.SIGSTOP)  # else it may write the exit code before it is killed

    def write(path: object, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(keeper, "write", write)
        with pytest.raises(OSError, match="No space left"):  # of its exit code: it is asked again
            runner.kill("job", 1)
    assert all(map(is_gone, processes))
    runner.kill("job", 1)
    assert code_of(runner) == -9


def test_what_was_killed_before_it_began_does_not_begin(
    runner: LocalRunner, tmp_path: Path
) -> None:
    runner.kill("job", 1)
    runner.start(order(tmp_path, LASTS))
    assert runner.ended("job", 1) == -1
    assert not (tmp_path / "jobs" / "job" / "1" / "process").exists()


def is_locked(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_all_that_it_started_is_gone_when_it_has_ended(runner: LocalRunner, tmp_path: Path) -> None:
    runner.start(order(tmp_path, FAMILY))
    assert code_of(runner) == 0
    *started, _, _ = family(tmp_path)
    assert all(map(is_gone, started))


def test_a_job_without_its_keeper_has_ended_with_all_that_it_started(
    runner: LocalRunner, tmp_path: Path
) -> None:
    runner.start(order(tmp_path, LASTS))
    found = family(tmp_path)
    os.kill(found[-1], signal.SIGKILL)
    assert code_of(runner) == -9
    until(lambda: all(map(is_gone, found[1:])) and is_gone(found[0]))


def test_it_is_asked_to_end_by_a_signal(runner: LocalRunner, tmp_path: Path) -> None:
    code = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))\n"
        "open('ready', 'w').close(); time.sleep(1000)"
    )
    runner.start(order(tmp_path, code))
    until((tmp_path / "ready").exists)
    until((tmp_path / "jobs" / "job" / "1" / "process").exists)
    runner.stop("job", 2)
    assert runner.ended("job", 1) is None
    runner.stop("job", 1)
    assert code_of(runner) == 130


def test_what_cannot_be_started_says_so(runner: LocalRunner, tmp_path: Path) -> None:
    one = order(tmp_path, "")
    missing = JobOrder(
        job="job",
        incarnation=1,
        command=["no-such-command"],
        environ={},
        folder=one.folder,
        rollout_nodes=[],
        train_nodes=[],
    )
    runner.start(missing)
    assert code_of(runner) == 127
    assert "no-such-command" in runner.last_lines("job")
    with pytest.raises(OSError, match="nowhere"):
        runner.start(
            JobOrder(
                job="job",
                incarnation=2,
                command=["true"],
                environ={},
                folder=str(tmp_path / "nowhere"),
                rollout_nodes=[],
                train_nodes=[],
            )
        )


def test_all_of_a_job_is_gone_once_its_host_has_had_no_contact_for_too_long(
    tmp_path: Path,
) -> None:
    contact = tmp_path / "contact"
    runner = LocalRunner(tmp_path, contact)
    keeper.write(contact, f"{keeper.now_s()}")
    runner.start(order(tmp_path, LASTS))
    found = family(tmp_path)
    os.kill(found[3], signal.SIGSTOP)
    time.sleep(2 * keeper.LOOK_S)
    assert not any(map(is_gone, found))
    keeper.write(contact, f"{keeper.now_s() - keeper.FENCE_S - 0.1}")
    assert code_of(runner) == -9
    assert all(map(is_gone, found[:-1]))
    until(lambda: is_gone(found[-1]))  # the keeper itself, once it has written the code
    assert "cut off from the cluster for 3" in runner.last_lines("job")
    runner.start(order(tmp_path, "open('begun', 'w')", 2))
    assert code_of(runner, 2) == 127
    assert not (tmp_path / "begun").exists()
