"""Worker processes: whatever happens to one, it is ended, replaced, named, and leaves nothing."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollpacker.rewards.build import build_reward
from rollpacker.rewards.reward import Cause, Failed, RewardConfig, RewardError, Scored
from rollpacker.workers.frames import Message
from rollpacker.workers.kinds import ANSWER, HELLO
from rollpacker.workers.worker import WorkerProcess
from tests.rewards.plain import (
    FULL,
    LINUX,
    is_alive,
    note,
    pids_in,
    reward,
    sample,
    scored,
    until,
    values,
    wait_for,
    write,
)

# -- what runs in it ---------------------------------------------------------------------


def test_a_worker_is_light() -> None:
    code = "import sys, rollpacker.rewards.functions.worker_program, rollpacker.workers.guardian\n"
    code += "print(*sorted({'torch', 'numpy', 'asyncio', 'pydantic'} & set(sys.modules)))\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_nothing_of_the_function_is_imported_here(tmp_path: Path) -> None:
    source = f"import os\n{note(tmp_path)}\ndef f(completions):\n    return [1.0]\n"
    assert values(reward(tmp_path, source), [sample()]) == [1.0]
    assert len(pids_in(tmp_path)) == 1
    assert os.getpid() not in pids_in(tmp_path)


def test_modules_are_found_as_here_and_files_of_the_folder_hide_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('not this one')\n")
    (tmp_path / "pickle.py").write_text("raise SystemExit('not this one')\n")
    (tmp_path / "mine_for_workers.py").write_text("def f(completions):\n    return [2.0]\n")
    monkeypatch.chdir(tmp_path)
    one = build_reward([RewardConfig(function="mine_for_workers:f")])
    monkeypatch.chdir("/")
    assert values(one, [sample()]) == [2.0]
    assert values(one, [sample()]) == [2.0], "later workers start in the folder of the first"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import os\nos._exit(3)\n", r"importing it ended the worker \(exit status 3\)"),
        ("import os\nos.kill(os.getpid(), 9)\n", r"ended the worker \(signal 9, SIGKILL\)"),
        ("raise SystemExit(2)\n", "raised SystemExit: 2"),
    ],
)
def test_imports_that_do_not_come_back(tmp_path: Path, source: str, expected: str) -> None:
    with pytest.raises(RewardError, match=expected):
        reward(tmp_path, source)


# -- workers that end ---------------------------------------------------------------------


@LINUX
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("os._exit(3)", "exit status 3"),
        ("os.kill(os.getpid(), 9)", "signal 9, SIGKILL"),
        ("ctypes.string_at(0)", "signal 11, SIGSEGV"),
        ("os.killpg(0, 15)", "signal 15, SIGTERM"),
    ],
)
def test_a_sample_that_ends_workers_takes_no_other_down(
    tmp_path: Path, how: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = f"""
        import ctypes, os, resource
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        def f(completions):
            if "bad" in completions:
                {how}
            return [1.0] * len(completions)
    """
    samples = [sample(), sample("bad"), sample()]
    verdicts = scored(reward(tmp_path, source, workers=2), samples)
    assert [getattr(v, "value", None) for v in verdicts] == [1.0, None, 1.0]
    assert verdicts[1] == Failed(
        reason=f"f ended its worker twice, {said}", parts={"f": None}, cause=Cause.SAMPLE
    )
    assert f"ended by itself ({said}); it is replaced" in caplog.text


@LINUX
def test_a_worker_killed_from_outside_changes_no_verdict(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = f"""
        import os, time
        def f(completions):
            {note(tmp_path)}
            pids = [name for name in os.listdir({str(tmp_path)!r}) if name[:4] == "pid-"]
            time.sleep(60 if len(pids) == 1 else 0)  # the first one is killed
            return [1.0] * len(completions)
    """
    one = reward(tmp_path, source)

    async def run() -> tuple[int, list[Any]]:
        call = asyncio.ensure_future(one.score([sample()]))
        await until(lambda: bool(pids_in(tmp_path)))
        (pid,) = pids_in(tmp_path)
        os.kill(pid, signal.SIGKILL)
        verdicts = await call
        await one.close()
        return pid, verdicts

    pid, verdicts = asyncio.run(run())
    assert verdicts == [Scored(value=1.0, parts={"f": 1.0})]
    assert len(pids_in(tmp_path)) == 2
    lines = [r.getMessage() for r in caplog.records if f"(pid {pid})" in r.getMessage()]
    assert len(lines) == 1 and "worker f-1" in lines[0]


@LINUX
def test_a_stopped_worker_is_no_fault_of_the_sample(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = f"""
        import os, time
        def f(completions):
            {note(tmp_path)}
            pids = [name for name in os.listdir({str(tmp_path)!r}) if name[:4] == "pid-"]
            time.sleep(600 if len(pids) == 1 else 0)  # the first one is stopped
            return [1.0] * len(completions)
    """
    one = reward(tmp_path, source, timeout_s=60, workers=2)

    async def run() -> tuple[int, list[Any], float]:
        call = asyncio.ensure_future(one.score([sample("slow")]))
        await until(lambda: bool(pids_in(tmp_path)))
        (pid,) = pids_in(tmp_path)
        os.kill(pid, signal.SIGSTOP)
        started = time.monotonic()
        others = await asyncio.gather(*(one.score([sample()]) for _ in range(20)))
        others_s = time.monotonic() - started
        (verdict,) = await call
        again = await one.score([sample("slow")])
        await one.close()
        assert all(isinstance(other, Scored) for (other,) in others)
        return pid, [verdict, *again], others_s

    started = time.monotonic()
    pid, (stopped, again), others_s = asyncio.run(run())
    assert time.monotonic() - started < 50, "long before the deadline"
    assert isinstance(stopped, Failed) and stopped.cause is Cause.INFRASTRUCTURE
    assert f"worker f-1 (pid {pid}) was stopped" in stopped.reason
    assert isinstance(again, Scored)
    assert others_s < 40
    lines = [r.getMessage() for r in caplog.records if f"(pid {pid}) was stopped" in r.getMessage()]
    assert sum("ended and replaced" in line for line in lines) == 1
    assert not is_alive(pid)


@LINUX
@pytest.mark.parametrize("ended_by", ["deadline", "close", "exit"])
def test_children_end_with_their_worker(tmp_path: Path, ended_by: str) -> None:
    """Plain ones, daemons in sessions of their own, and those that ignore signals. Until then the
    children of a call that has returned are let be."""
    end = {"deadline": "time.sleep(600)", "close": "pass", "exit": "os._exit(1)"}[ended_by]
    source = f"""
        import os, signal, subprocess, time
        def daemon():
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    signal.signal(signal.SIGTERM, signal.SIG_IGN)
                    {note(tmp_path)}
                    time.sleep(600)
                os._exit(0)
        def count():
            return sum(name[:4] == "pid-" for name in os.listdir({str(tmp_path)!r}))
        def f(completions):
            before = count()
            {note(tmp_path)}
            daemon()
            child = subprocess.Popen(["sleep", "600"])
            open({str(tmp_path)!r} + f"/pid-{{child.pid}}", "w").close()
            while count() < before + 3:
                time.sleep(0.01)
            {end}
            return [1.0]
    """
    one = reward(tmp_path, source, timeout_s=6.0 if ended_by == "deadline" else 60.0)

    async def run() -> None:
        await one.score([sample()])
        if ended_by == "close":
            assert len(pids_in(tmp_path)) == 3
            assert all(is_alive(pid) for pid in pids_in(tmp_path))
        await one.close()

    asyncio.run(run())
    assert len(pids_in(tmp_path)) == (6 if ended_by == "exit" else 3)
    assert wait_for(lambda: not any(map(is_alive, pids_in(tmp_path))))


@LINUX
@pytest.mark.parametrize("stopped", [False, True])
def test_everything_ends_when_the_controller_is_killed(tmp_path: Path, stopped: bool) -> None:
    path = write(
        tmp_path,
        f"""
        import os, subprocess, re
        def f(completions):
            child = subprocess.Popen(["sleep", "600"])
            open({str(tmp_path)!r} + f"/pid-{{child.pid}}", "w").close()
            {note(tmp_path)}
            {"os.kill(os.getpid(), 19)" if stopped else "pow(7, 10**10)"}
    """,
    )
    code = (
        "import asyncio\n"
        "from rollpacker.rewards.reward import RewardConfig\n"
        "from rollpacker.rewards.build import build_reward\n"
        "from tests.rewards.plain import sample\n"
        f"one = build_reward([RewardConfig(function={f'{path}:f'!r}, workers=1)])\n"
        "asyncio.run(one.score([sample()]))\n"
    )
    controller = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2])
    try:
        assert wait_for(lambda: len(pids_in(tmp_path)) == 2, 120)
        assert all(map(is_alive, pids_in(tmp_path)))
    finally:
        controller.kill()
        controller.wait()
    assert wait_for(lambda: not any(map(is_alive, pids_in(tmp_path))), 60)


@LINUX
def test_a_guardian_that_is_killed_or_stopped(tmp_path: Path) -> None:
    source = f"""
        import os, time
        def f(completions):
            {note(tmp_path)}
            if completions == ["guardian"]:
                os.kill(os.getppid(), 9)
                time.sleep(600)
            if completions == ["stop"]:
                os.kill(os.getppid(), 19)
            return [1.0]
    """
    one = reward(tmp_path, source)
    stop, killed, fine = (sample(c) for c in ("stop", "guardian", "fine"))

    async def run() -> list[Any]:
        got = [(await one.score([s]))[0] for s in (stop, killed, fine)]
        await one.close()
        return got

    first, second, third = asyncio.run(run())
    assert isinstance(first, Scored) and isinstance(third, Scored)
    assert isinstance(second, Failed) and "ended its worker twice" in second.reason
    assert wait_for(lambda: not any(map(is_alive, pids_in(tmp_path))))


@LINUX
def test_a_function_that_forks_and_returns_twice(tmp_path: Path) -> None:
    source = """
        import os
        def f(completions):
            pid = os.fork()
            return [float(pid == 0)]
    """
    one = reward(tmp_path, source)

    async def run() -> list[Any]:
        got = [(await one.score([sample()]))[0] for _ in range(5)]
        await one.close()
        return got

    assert asyncio.run(run()) == [Scored(value=0.0, parts={"f": 0.0})] * 5


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def own_children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


@LINUX
def test_nothing_is_left_behind(tmp_path: Path) -> None:
    source = """
        import os, time
        def f(completions):
            match completions[0]:
                case "exit": os._exit(1)
                case "slow": time.sleep(30)
                case "raise": raise ValueError
            return [1.0]
    """

    def once() -> None:
        one = reward(tmp_path, source, timeout_s=0.05, workers=2)
        scored(one, [sample(c) for c in ("exit", "slow", "raise", "fine")])

    once()
    descriptors, children = open_descriptors(), own_children()
    for _ in range(50 if FULL else 2):
        once()
    # Of those, some that earlier tests left may go meanwhile.
    assert open_descriptors() <= descriptors and own_children() <= children
    with pytest.raises(RewardError):
        reward(tmp_path, "def g(): pass\n")
    assert open_descriptors() <= descriptors and own_children() <= children


@LINUX
def test_a_run_that_forgets_to_close_leaves_nothing(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        f"""
        import os, subprocess
        def f(completions):
            {note(tmp_path)}
            child = subprocess.Popen(["sleep", "600"])
            open({str(tmp_path)!r} + f"/pid-{{child.pid}}", "w").close()
            return [1.0]
    """,
    )
    code = (
        "import asyncio\n"
        "from rollpacker.rewards.reward import RewardConfig\n"
        "from rollpacker.rewards.build import build_reward\n"
        "from tests.rewards.plain import sample\n"
        f"one = build_reward([RewardConfig(function={f'{path}:f'!r})])\n"
        "print(asyncio.run(one.score([sample()])))\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=root
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(pids_in(tmp_path)) == 2
    assert wait_for(lambda: not any(map(is_alive, pids_in(tmp_path))))


@pytest.mark.parametrize(
    ("kind", "payload"),
    [*((ANSWER, payload) for payload in (b"[1]", b"1", b"null", b"x")), (HELLO, b"x")],
)
def test_a_message_that_no_worker_of_ours_sends_is_a_value_error(kind: int, payload: bytes) -> None:
    """A function may find the socket and write to it; a `ValueError` ends its line alone."""
    worker: Any = SimpleNamespace(child=SimpleNamespace(pid=1))
    with pytest.raises(ValueError):
        WorkerProcess._understood(worker, Message(kind, 0, payload))
