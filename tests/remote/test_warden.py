"""A host's warden, without ray: jobs are started once, stopped, and killed with all they have."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollpacker.remote.warden import MARK, Warden, _marked, kill_marked

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")
STOPS = """
import signal, subprocess, sys, time
subprocess.Popen(["sleep", "600"], start_new_session=True)
def stop(*_):
    print("stopping", flush=True)
    sys.exit(130)
signal.signal(signal.SIGTERM, stop)
print("there", flush=True)
time.sleep(600)
"""


@pytest.fixture
def warden() -> Iterator[Warden]:
    found = Warden()
    yield found
    for mark in [*found._jobs]:
        found.kill(mark)


@pytest.fixture
def start(warden: Warden, tmp_path: Path) -> Callable[..., Path]:
    def starts(mark: str, code: str, **environ: str) -> Path:
        output = tmp_path / "jobs" / "lines.log"
        warden.start(mark, [sys.executable, "-c", code], environ, str(tmp_path), str(output))
        return output

    return starts


def until(holds: Callable[[], object], within_s: float = 20.0) -> None:
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def name() -> str:
    return f"test/{os.getpid()}/{time.monotonic_ns()}"


def test_a_job_runs_once_where_it_should_with_its_environment(warden, start, tmp_path) -> None:
    mark = name()
    code = (
        "import os; print(os.getcwd(), os.environ['SEAT'], os.environ.get('RAY_ADDRESS'),"
        " os.environ.get('RAY_OTHER'), flush=True); raise SystemExit(7)"
    )
    os.environ["RAY_OTHER"] = "not for jobs"
    try:
        output = start(mark, code, SEAT="file:x#a#1", RAY_ADDRESS="1.2.3.4:6379")
    finally:
        del os.environ["RAY_OTHER"]
    until(lambda: warden.ended(mark) is not None)
    assert warden.ended(mark) == 7
    start(mark, "print('twice')")
    assert warden.ended(mark) == 7
    assert warden.last_lines(str(output), 4000).split() == [
        *(str(tmp_path), "file:x#a#1", "1.2.3.4:6379", "None")
    ]
    assert warden.ended(name()) == -1 and not warden.knows(name())


def test_stop_is_sigterm_to_the_job_and_everything_goes_with_it(warden, start) -> None:
    mark = name()
    output = start(mark, STOPS)
    until(lambda: "there" in warden.last_lines(str(output), 4000))
    assert warden.ended(mark) is None and len(_marked(mark)) == 3  # guardian, job, its own
    warden.stop(mark)
    warden.stop(mark)
    until(lambda: warden.ended(mark) is not None)
    assert warden.ended(mark) == 130
    assert warden.last_lines(str(output), 4000).count("stopping") == 1
    assert _marked(mark) == []


def test_kill_returns_when_nothing_is_left_not_even_what_is_stopped(warden, start) -> None:
    mark = name()
    output = start(mark, STOPS)
    until(lambda: "there" in warden.last_lines(str(output), 4000))
    for pid in _marked(mark):
        os.kill(pid, 19)  # SIGSTOP: the guardian, too
    warden.kill(mark)
    assert _marked(mark) == []
    assert warden.ended(mark) == -9


def test_what_another_host_has_of_a_job_is_found_by_its_mark() -> None:
    mark, other = name(), name()
    children = [
        subprocess.Popen(["sleep", "600"], env={**os.environ, MARK: one}, start_new_session=True)
        for one in (mark, other, f"{mark}0")
    ]
    try:
        until(lambda: _marked(mark) and _marked(other) and _marked(f"{mark}0"))
        kill_marked(mark)
        assert children[0].wait(5) == -9
        assert children[1].poll() is None and children[2].poll() is None
    finally:
        for child in children:
            child.kill()
            child.wait()


def test_what_an_earlier_warden_left_is_gone_before_a_job_starts(warden, start) -> None:
    mark = name()
    left = subprocess.Popen(["sleep", "600"], env={**os.environ, MARK: mark})
    until(lambda: _marked(mark))
    start(mark, "pass")
    assert left.wait(5) == -9
    until(lambda: warden.ended(mark) is not None)
    assert warden.ended(mark) == 0
