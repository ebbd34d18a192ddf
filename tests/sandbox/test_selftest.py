"""The self-test against boxes that do not contain, and against one that does."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rollpacker.sandbox import canaries, open_sandbox
from rollpacker.sandbox.sandbox import Limits, RunResult, Status
from rollpacker.sandbox.selftest import ESSENTIAL, _endless, _left_over, _signals, self_test

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandboxes here are Linux's")

HARMLESS = {
    "runs": "print(6 * 7)",
    "environment": canaries.ENVIRONMENT,
    "host files": canaries.HOST_FILES,
    "network": canaries.NETWORK,
    "signals": canaries.SIGNALS,
    "left over": canaries.DAEMONS,
    "descriptors": canaries.DESCRIPTORS,
}
"""Canaries that may run without a sandbox on a machine that is in use."""


class Answers:
    """Says the same whatever it is asked: nothing ever ran."""

    def __init__(self, result: RunResult) -> None:
        self.result = result

    async def run(self, program: str, **more: object) -> RunResult:
        return self.result


class Plain:
    """Runs harmless canaries as plain processes, and fails on all others."""

    def __init__(self) -> None:
        self.ran: set[str] = set()

    async def run(self, program: str, *, limits: Limits, files: dict[str, str]) -> RunResult:
        for name, body in HARMLESS.items():
            if body in program:  # one of them says at its end how long it stays
                self.ran.add(name)
                return await asyncio.to_thread(self._run, program, limits, files)
        raise RuntimeError("not outside of a sandbox")

    @staticmethod
    def _run(program: str, limits: Limits, files: dict[str, str]) -> RunResult:
        reader, writer = os.pipe()
        with tempfile.TemporaryDirectory() as folder:
            for name, text in {**files, "main.py": program}.items():
                Path(folder, name).write_text(text)
            process = subprocess.Popen(
                # A parent of its own, for the canaries that stop their parent.
                ["/bin/sh", "-c", f"{sys.executable} main.py; true"],
                cwd=folder,
                stdout=subprocess.PIPE,
                pass_fds=(reader,),
                start_new_session=True,
            )
            try:
                stdout, _ = process.communicate(timeout=min(limits.wall_s, 1.0))
                status = Status.OK
            except subprocess.TimeoutExpired as error:
                stdout, status = error.stdout or b"", Status.TIMEOUT
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        os.close(reader)
        os.close(writer)
        return RunResult(status=status, exit_code=0, stdout=stdout)


def test_a_probe_that_never_ran_proves_nothing() -> None:
    for stdout in (b"42\n", b"", b"tried looked started"):
        box = Answers(RunResult(status=Status.OK, exit_code=0, stdout=stdout))
        passed, failed = asyncio.run(self_test(box, backend="bwrap"))
        assert set(passed) <= {"runs"}
        assert ESSENTIAL - {"runs"} <= set(failed)


def test_a_box_that_cannot_run_anything_passes_nothing() -> None:
    broken = Answers(RunResult(status=Status.SANDBOX_ERROR, detail="no"))
    passed, failed = asyncio.run(self_test(broken, backend="bwrap"))
    assert not passed
    assert set(failed) == ESSENTIAL


class Busy:
    """A box and a bait on a machine so busy that processes show late, and programs begin late."""

    local = True

    def __init__(self) -> None:
        self.stays_s = 0.0
        command = [sys.executable, "-c", "input()"]
        self.bystander = subprocess.Popen(command, stdin=subprocess.PIPE)

    def program(self, body: str) -> str:
        return body

    def marked(self) -> list[int]:
        """Seen only of those that stay for half a second."""
        return [2**30] if self.stays_s >= 0.5 else []

    async def run(self, program: str, *, limits: Limits, files: dict[str, str]) -> RunResult:
        if program == "print(6 * 7)":
            return RunResult(status=Status.OK, exit_code=0, stdout=b"42\n")
        stays = re.search(r"sleep\(([\d.]+)\)\n$", program)
        self.stays_s = float(stays[1]) if stays else 0.0
        await asyncio.sleep(0.05)
        self.stays_s = 0.0
        began = limits.wall_s > 0.5
        return RunResult(status=Status.OK, exit_code=0, stdout=b"tried\n" if began else b"")


def test_a_busy_machine_is_no_alarm() -> None:
    """One in twelve self-tests said "not contained" where daemons had not been seen at all."""
    busy = Busy()
    try:
        for canary in (_left_over, _signals):
            assert asyncio.run(canary(busy, busy))  # type: ignore[arg-type]
    finally:
        busy.bystander.communicate(b"\n")


def test_a_sandbox_that_failed_once_is_asked_again() -> None:
    """A worker that a busy machine held up was replaced, and the run reported as no containment."""

    found = [Status.SANDBOX_ERROR, Status.TIMEOUT]

    class Replaced(Busy):
        async def run(self, program: str, *, limits: Limits, files: dict[str, str]) -> RunResult:
            return RunResult(status=found.pop(0))

    box = Replaced()
    try:
        assert asyncio.run(_endless(box, box))  # type: ignore[arg-type]
    finally:
        box.bystander.communicate(b"\n")


def test_plain_processes_are_seen_to_contain_nothing() -> None:
    os.environ["ROLLPACKER_SELFTEST_PROBE"] = "a-value-that-nobody-else-has"
    try:
        box = Plain()
        passed, failed = asyncio.run(self_test(box, backend="none"))
    finally:
        del os.environ["ROLLPACKER_SELFTEST_PROBE"]
    assert box.ran == set(HARMLESS)
    assert passed == ("runs",)
    assert set(HARMLESS) - {"runs"} <= set(failed)


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="NOT TESTED: bwrap is not installed")
def test_bubblewrap_contains_every_canary() -> None:
    async def go() -> tuple[tuple[str, ...], tuple[str, ...]]:
        async with open_sandbox("bwrap", workers=1) as box:
            return await self_test(box, backend="bwrap")

    passed, failed = asyncio.run(go())
    assert not failed
    assert set(passed) == ESSENTIAL
