"""The controller is killed, and what it leaves is a run that can be resumed, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

ORPHAN = """
import subprocess, sys, time
sys.path.insert(0, sys.argv[1])
from tests.run import controller_faults as faults

faults.adopt()
before = set(faults.descendants())
subprocess.run(["sh", "-c", "setsid sleep 100 >/dev/null 2>&1 & exit"])
until = time.monotonic() + 60
while True:
    left = {pid: text for pid, text in faults.descendants().items() if pid not in before}
    became = [text.split()[0] for text in left.values()]  # it is sh and setsid for a moment
    if became == ["sleep"] or time.monotonic() > until:
        break
    time.sleep(0.01)
print(*left)
assert became == ["sleep"], left
"""


def test_who_has_lost_its_parent_is_seen() -> None:
    """Otherwise the next test would not show much."""
    command = [sys.executable, "-c", ORPHAN, ROOT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    for pid in map(int, done.stdout.split()):
        os.kill(pid, signal.SIGKILL)
    assert done.returncode == 0, done.stderr


def test_three_kills_leave_nothing_and_change_nothing() -> None:
    """While it trains, generates, and writes a checkpoint."""
    command = [sys.executable, "-m", "tests.run.controller_faults"]
    done = subprocess.run(
        [*command, "--kills=3", "--arm", "local"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert result["all_well"] and result["arms"]["local"]["kills"] == 3
