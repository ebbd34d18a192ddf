"""The same scenario is the same run, event by event, in any process; and its log replays."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollpacker.cli.simulations import simulate_all
from rollpacker.core.job.config import JobConfig
from rollpacker.core.records import Session
from rollpacker.report.log import EventLog
from rollpacker.run.replay import replay
from rollpacker.sim.latency import Calibration
from rollpacker.sim.scenario import load_scenario
from rollpacker.sim.simulate import job_config, machine_of

SCENARIOS = sorted((Path(__file__).parents[2] / "configs/scenarios").glob("*.yaml"))
STEPS = 5
"""Four short rounds and a long one."""
SMALLER = (f"steps={STEPS}", "rollout.prompts_per_step=32")
"""For the time it takes; the rest stays what it is."""

PRINT_HASHES = """\
import sys
from pathlib import Path
from tests.sim.test_purity import SCENARIOS, log_hash
for path in SCENARIOS:
    print(path.stem, log_hash(path, Path(sys.argv[1]) / "log.jsonl"))
"""


def log_hash(path: Path, log: Path, *more: str) -> str:
    """SHA-256 of the event log of a few steps."""
    simulate_all({"own": load_scenario(path, [*SMALLER, *more])}, log=log)
    return hashlib.sha256(log.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def hashes_by_process(tmp_path_factory) -> list[dict[str, str]]:
    """What two processes that hash differently find for all scenarios."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PRINT_HASHES, str(tmp_path_factory.mktemp("log"))],
            env=os.environ | {"PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    printed = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    return [dict(line.split() for line in text.splitlines()) for text in printed]


@pytest.fixture(params=SCENARIOS, ids=lambda path: path.stem)
def path(request) -> Path:
    return request.param


def test_the_shipped_scenarios_are_there():
    assert {path.stem for path in SCENARIOS} >= {"7b-8k", "14b-16k", "32b-32k", "128-gpus"}


def test_the_log_is_the_same_under_every_hash_seed_and_replays(path, tmp_path, hashes_by_process):
    log = tmp_path / "log.jsonl"
    here = log_hash(path, log)
    assert [hashes[path.stem] for hashes in hashes_by_process] == [here, here]
    replayed = replay(EventLog(log))
    assert replayed.difference is None
    assert replayed.num_steps == STEPS
    assert replayed.num_events == len(log.read_text().splitlines()) - 1


def test_what_goes_wrong_is_in_the_log_and_replays(tmp_path):
    log = tmp_path / "log.jsonl"
    unkind = "unkind={failure_rate: 0.02, late_finish_rate: 0.3, infrastructure_rate: 0.05}"
    hashes = [log_hash(SCENARIOS[0], log, unkind) for _ in range(2)]
    assert hashes[0] == hashes[1] != log_hash(SCENARIOS[0], tmp_path / "calm.jsonl")
    replayed = replay(EventLog(log))
    assert replayed.difference is None and replayed.num_steps == STEPS


def test_another_seed_or_setting_is_another_log(tmp_path):
    path = SCENARIOS[0]
    changes = ("seed=0",), ("seed=1",), ("tail_batching.prompt_factor=1.5",), ("system=verl",)
    hashes = {log_hash(path, tmp_path / "log.jsonl", *change) for change in changes}
    assert len(hashes) == len(changes)


def test_a_log_without_one_of_its_responses_does_not_replay(tmp_path):
    log = tmp_path / "log.jsonl"
    log_hash(SCENARIOS[0], log)
    lines = log.read_text().splitlines(keepends=True)
    del lines[next(n for n, line in enumerate(lines) if '"command":"Score"' in line)]
    log.write_text("".join(lines))
    assert replay(EventLog(log)).difference is not None


def test_the_log_begins_with_the_configuration(path, tmp_path):
    log = tmp_path / "log.jsonl"
    made = load_scenario(path, [*SMALLER, "steps=1"])
    simulate_all({"own": made}, log=log)
    session = next(iter(EventLog(log)))
    assert isinstance(session, Session)
    config = job_config(made, machine_of(made, Calibration()))
    assert JobConfig.from_plain(session.job) == config
