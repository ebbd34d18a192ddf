"""The real thing on a tiny model, killed and resumed: equal to the uninterrupted run bit for
bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_killed_and_resumed_runs_equal_the_uninterrupted_one() -> None:
    """After every one of a few steps and at random moments; see benchmarks/resume.py."""
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "resume.py", "--quick"],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": equal") >= 3
    assert '"all_equal": true' in done.stdout
