"""`examples/trl_shared`: TRL scripts that take turns compute what each computes alone."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest

from tests.cluster_phase.file_seat import jobs_of, turns, two_at_once

ROOT = Path(__file__).parents[2]
STOPPED = 130
SCRIPT = "examples/trl_shared/train.py"


def begin(output: Path, seat: Path | None = None, steps: int = 4) -> subprocess.Popen[bytes]:
    """The script, as the job named as its output folder if there is a seat."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, SCRIPT, "--output", str(output), "--steps", str(steps)]
    if seat is not None:
        environ["ROLLPACKER_SEAT"] = f"{seat}#{output.name}"
        command[1:1] = ["-m", "tests.cluster_phase.file_seat"]
    log = output.with_suffix(".log").open("ab")
    return subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=log)


def ended(process: subprocess.Popen[bytes], output: Path) -> int:
    code = process.wait(timeout=600)
    assert code in (0, STOPPED), output.with_suffix(".log").read_text()
    return code


def sums(output: Path, steps: int = 4) -> dict[str, str]:
    """SHA-256 of weights and optimizer after the last step."""
    last = output / f"checkpoint-{steps}"
    return {
        name: hashlib.sha256((last / name).read_bytes()).hexdigest()
        for name in ("model.safetensors", "optimizer.pt")
    }


@pytest.mark.timeout(900)
def test_scripts_that_take_turns_compute_the_same(tmp_path: Path) -> None:
    seat, alone, one, other = (tmp_path / name for name in ("seat", "alone", "one", "other"))
    seat.mkdir()
    assert ended(begin(alone), alone) == 0
    assert not any(entry.name.startswith("here") for entry in seat.iterdir())

    # The other is to stop after a commit, and goes on while the first one trains.
    (seat / "stop-other").write_text("1")
    assert ended(begin(other, seat), other) == STOPPED
    assert [path.name for path in other.glob("checkpoint-*")] == ["checkpoint-1"]
    (seat / "stop-other").unlink()
    (seat / "here-other").unlink()
    (seat / "all").write_text("one other")
    processes = [(begin(output, seat), output) for output in (one, other)]
    assert [ended(*each) for each in processes] == [0, 0]

    assert sums(one) == sums(other) == sums(alone)
    assert two_at_once(seat) == []
    for pool in ("rollout", "train"):
        jobs = jobs_of(seat, pool)
        assert len(list(groupby(jobs))) >= 5, jobs
        left = [turn["what"] for turn in turns(seat) if turn.get("pool") == pool]
        assert left.count("left") == len(jobs), left
    told = [(e["job"], e["step"]) for e in turns(seat) if e["what"] == "committed"]
    assert sorted(told) == [(job, step) for job in ("one", "other") for step in (1, 2, 3, 4)]
