"""Environments beside the engines of two hosts, with one of their processes killed in a run."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from tests.cluster.netns import Network, why_impossible
from tests.cluster.test_cluster import ROOT, cmdline, pytestmark
from tests.run.test_turns import TALK, save_model

__all__ = ["pytestmark"]


def environments(network: Network, host: int) -> list[int]:
    return [
        pid
        for pid in network.pids(host)
        if b"workers.hosted" in cmdline(pid) and b"guardian" not in cmdline(pid)
    ]


def test_trajectories_are_played_on_both_hosts_and_a_lost_process_costs_none(
    tmp_path: Path,
) -> None:
    assert not why_impossible()
    save_model(tmp_path / "model")
    (tmp_path / "talk.py").write_text(TALK)
    config = {
        "name": "talk",
        "runs_dir": str(tmp_path),
        "model": {"path": str(tmp_path / "model")},
        "data": {"train": {"kind": "jsonl", "path": "rows.jsonl"}, "max_prompt_tokens": 64},
        "runtime": "ray",
        "placement": {"rollout": {"devices": "1-2"}, "train": {"devices": "0-0"}},
        "environment": {"function": "talk.py:Talk", "per_host": 1, "max_turns": 4},
        "rollout": {
            "prompts_per_step": 4,
            "samples_per_prompt": 2,
            "max_response_tokens": 24,
            "stop": ["a", "e", "i", "o", "t", "s"],
        },
        "rewards": [{"function": "environment"}],
        "train": {"steps": 12, "learning_rate": 1e-3},
        "tail_batching": {"enabled": False},  # so that each that was lost is needed
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    rows = [{"prompt": f"Row {n}", "number": n} for n in range(64)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "rollpacker.cli.main", "train", "run.yaml"]
    log, said = tmp_path / "talk" / "events.jsonl", tmp_path / "said"
    with Network(2) as network, said.open("w") as output:
        network.start_ray()
        environment = {**network.environment, "PYTHONPATH": str(ROOT)}
        process = network.popen(
            0, command, cwd=tmp_path, env=environment, stdout=output, stderr=output
        )
        until = time.monotonic() + 400
        while not log.exists() or log.read_text().count('"Committed"') < 3:
            assert time.monotonic() < until and process.poll() is None, said.read_text()
            time.sleep(0.1)
        assert len(environments(network, 0)) <= 1  # the run's own host plays without an agent
        (pid,) = environments(network, 1)
        os.kill(pid, signal.SIGKILL)
        assert process.wait(until - time.monotonic()) == 0, said.read_text()
        left = [cmdline(pid) for host in (0, 1) for pid in network.pids(host)]
        assert not any(b"workers.hosted" in one for one in left)
    found = [json.loads(line) for line in log.read_text().splitlines()]
    acted = [one for one in found if one.get("event") == "Acted"]
    lost = {one["sample"] for one in acted if one.get("cause") == "infrastructure"}
    commands = [one for row in found for one in row.get("commands", ())]
    trained = [
        sample
        for one in commands
        if one["command"] == "TrainOn"
        for group in one["groups"]
        for sample in group
    ]
    assert len(trained) == len(set(trained)) == 12 * 4 * 2
    assert lost and lost <= set(trained)  # played again, from their beginning
