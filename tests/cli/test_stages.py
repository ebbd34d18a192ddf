"""What `report` and `compare` are busy with is seen in a terminal, and nowhere else."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.report.fake_run import FakeRun, write


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "[red]run"
    folder.mkdir()
    write(FakeRun(1).run(30), folder / "events.jsonl")
    return folder


def errors_of(*words: str, terminal: bool) -> str:
    """Standard error of a command, with a terminal there or a pipe."""
    command = [sys.executable, "-m", "rollpacker", *words]
    environment = {**os.environ, "TERM": "xterm", "FORCE_COLOR": "1"}  # as a kernel's children have
    ours, theirs = pty.openpty() if terminal else os.pipe()
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        found = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # a terminal that nobody holds any more
                break
            if not part:
                break
            found += part
    os.close(ours)
    assert process.returncode == 0, found.decode()
    return found.decode()


def test_stages_are_seen_in_a_terminal(run: Path) -> None:
    told = errors_of("report", str(run), terminal=True)
    assert "reading the" in told or "drawing" in told
    assert "report.html" in told and "\x1b[" in told


def test_a_pipe_gets_none(run: Path, tmp_path: Path) -> None:
    assert errors_of("report", str(run), terminal=False) == ""


def test_compare_names_the_run_that_it_reads(run: Path) -> None:
    told = errors_of("compare", str(run), str(run), terminal=True)
    assert "reading" in told and "[red]run" in told
