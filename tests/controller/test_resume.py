"""The real thing on a tiny model, killed and resumed: equal to the uninterrupted run bit for
bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("arm", ["pool", "queue"])
def test_killed_and_resumed_runs_equal_the_uninterrupted_one(arm: str) -> None:
    """After every one of a few steps and at random moments, with tokens carried over the kills; see
    benchmarks/resume.py."""
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "resume.py", "--quick", "--arm", arm],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": equal") >= 3
    assert '"all_equal": true' in done.stdout


_DEBIASED = """
import json, signal, sys, tempfile
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import resume
import torch, transformers  # once, before the forks

torch.set_num_threads(1)
overrides = (
    "tail_batching.selection=published",
    "tail_batching.debias=moments",
    "tail_batching.tiers=[{prompt_factor: 1.25, sample_factor: 1.25}]",
    "rollout.max_response_tokens=60",
)
with tempfile.TemporaryDirectory() as temporary:
    folder = Path(temporary)
    resume.write_model(folder / "model")
    config = resume.write_config(folder, 16)
    assert resume.run(config, "reference", overrides=overrides) == 0
    runs = folder / "runs"
    log = [json.loads(line) for line in (runs / "reference" / "events.jsonl").open()]
    commands = [command for entry in log for command in entry.get("commands", ())]
    weighted = [c["step"] for c in commands if c["command"] == "TrainOn" and c["weights"]]
    kinds = {c["kind"] for c in commands if c["command"] == "Launch"}
    middle = weighted[len(weighted) // 2]
    kill = resume.committed(middle)
    killed = resume.run(config, "killed", kill=kill, overrides=overrides)
    assert killed == -signal.SIGKILL, killed
    assert resume.run(config, "killed", resume=True, overrides=overrides) == 0
    one, other = (resume.fingerprints(runs / name) for name in ("reference", "killed"))
    print(json.dumps({
        "kinds": sorted(kinds),
        "weighted_around_the_kill": [weighted[0] < middle, middle < weighted[-1]],
        "different": [part for part in one if one[part] != other[part]],
        "problems": resume.check(runs / "killed" / "events.jsonl")["problems"],
    }))
"""


def test_a_run_with_loss_weights_and_cascades_resumes_exactly() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _DEBIASED, ROOT / "benchmarks"],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "kinds": ["cascade", "flush", "long", "short"],
        "weighted_around_the_kill": [True, True],
        "different": [],
        "problems": [],
    }
