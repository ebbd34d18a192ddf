"""The real thing on a tiny model, killed and resumed: equal to the uninterrupted run bit for
bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("arm", ["pool", "queue", "ahead"])
def test_killed_and_resumed_runs_equal_the_uninterrupted_one(arm: str) -> None:
    """After every one of a few steps and at random moments, with tokens carried over the kills; see
    benchmarks/resume.py."""
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "resume.py", "--quick", "--arms", arm],
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": equal") >= 3
    assert "all_equal: true" in done.stdout


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
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "kinds": ["cascade", "flush", "long", "short"],
        "weighted_around_the_kill": [True, True],
        "different": [],
        "problems": [],
    }


_GROWN = """
import json, signal, sys, tempfile
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import resume
import torch, transformers  # once, before the forks
from rollpacker.run.replay import replay
from rollpacker.report.log import EventLog

torch.set_num_threads(1)
small, large = ("rollout.max_response_tokens=40",), ("rollout.max_response_tokens=70",)


def cut_off(folder):
    state = json.loads((folder / "state.json").read_text())["job"]
    waiting = [p for queue in (state["queue"], *state["tier_queues"]) for p in queue]
    return sum(tokens == 40 for _, _, carried in waiting for tokens, _ in carried)


with tempfile.TemporaryDirectory() as temporary:
    folder = Path(temporary)
    resume.write_model(folder / "model")
    config = resume.write_config(folder, 12)
    runs = folder / "runs"
    killed = resume.run(config, "one", kill=resume.committed(5), overrides=small)
    assert killed == -signal.SIGKILL, killed
    checkpoints = runs / "one" / "checkpoints"
    num_cut_off = cut_off(checkpoints / (checkpoints / "latest").read_text().strip())
    import shutil
    shutil.copytree(runs / "one", runs / "two")
    shutil.copytree(runs / "one", runs / "less")
    assert resume.run(config, "one", resume=True, overrides=large) == 0
    killed = resume.run(config, "two", resume=True, kill=resume.committed(8), overrides=large)
    assert killed == -signal.SIGKILL, killed
    assert resume.run(config, "two", resume=True, overrides=large) == 0
    log = [json.loads(line) for line in (runs / "one" / "events.jsonl").open()]
    sessions = [at for at, entry in enumerate(log) if "session" in entry]
    ends = [[e for e in part if e.get("event") in ("SampleGenerated", "SampleAborted")]
            for part in (log[: sessions[1]], log[sessions[1] :])]
    longest = [max(e["num_tokens"] for e in part) for part in ends]
    went_on = sum(e.get("num_kept") == 40 and e["num_tokens"] > 40 for e in ends[1])
    one, two = (resume.fingerprints(runs / name) for name in ("one", "two"))
    lower = "rollout.max_response_tokens=30"
    print(json.dumps({
        "cut_off": num_cut_off > 0,
        "longest": longest,
        "went_on": went_on > 0,
        "different": [part for part in one if one[part] != two[part]],
        "problems": resume.check(runs / "one" / "events.jsonl")["problems"],
        "replay": replay(EventLog(runs / "one" / "events.jsonl")).difference,
        "less": resume.run(config, "less", resume=True, overrides=(lower,)) != 0,
    }))
"""


def test_a_run_goes_on_with_a_larger_cap_on_responses() -> None:
    """What waits with as many tokens as were allowed goes on; whoever is killed then resumes
    exactly; the log replays over the change."""
    done = subprocess.run(
        [sys.executable, "-c", _GROWN, ROOT / "benchmarks"],
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "cut_off": True,
        "longest": [40, 70],
        "went_on": True,
        "different": [],
        "problems": [],
        "replay": None,
        "less": True,
    }
    assert "40 -> 70: responses that wait go on from where they were cut off" in done.stderr
    assert "40 -> 30: it may only grow" in done.stderr
