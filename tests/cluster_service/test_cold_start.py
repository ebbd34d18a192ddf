"""What a run does while it holds a pool for its start: others wait, and its beat may be late."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.resume import write_config, write_model
from rollpacker.cluster.seats.seat import SEAT_VARIABLE
from tests.cluster_service.lab import ROOT

MOST_MODULES = 200
"""Of the run's own, and what a model's class is in. The libraries together are 2,000."""
CODE = """
import contextlib, json, sys
from rollpacker.run.parts import seats
from rollpacker.cli.main import main

loaded, holding = {}, seats.RunSeat.holding

@contextlib.contextmanager
def watched(seat, pool):
    with holding(seat, pool):
        before = set(sys.modules)
        yield
        loaded[pool] = sorted(set(sys.modules) - before)

seats.RunSeat.holding = watched
code = main(["train", sys.argv[1], "train.steps=1", "train.processes=1"])
print(json.dumps(loaded))
sys.exit(code)
"""


def test_libraries_are_loaded_before_a_pool_is_held(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    config = write_config(tmp_path, 1)
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(config)],
        cwd=tmp_path,
        env={**os.environ, SEAT_VARIABLE: "alone", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout.splitlines()[-1])
    assert set(loaded) == {"rollout", "train"}
    for pool, modules in loaded.items():
        assert len(modules) < MOST_MODULES, (pool, len(modules), modules[:50])
