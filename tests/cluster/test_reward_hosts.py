"""Reward hosts beside the engines of two hosts, each of them killed in the middle of a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from tests.cluster.netns import Network, why_impossible
from tests.cluster.test_cluster import ROOT, cmdline, pytestmark

__all__ = ["pytestmark"]
PLACES = ("placement.rollout.devices=1-2", "placement.train.devices=0-0")


def model(folder: Path) -> Path:
    """The quickstart's, after a few steps of its warm-up."""
    path = folder / "model"
    steps = ("stages.0.steps=60", "stages.0.max_loss=null", "stages.1.steps=12")
    warm_up = ("warmup", "configs/quickstart-warmup.yaml", f"output={path}", *steps)
    for command in (
        ("examples/quickstart/make_demonstrations.py",),
        ("-m", "rollpacker.cli.main", *warm_up),
    ):
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
    return path


def reward_host(network: Network, host: int) -> int:
    (pid,) = (
        pid
        for pid in network.pids(host)
        if b"rewards.host_worker" in cmdline(pid) and b"guardian" not in cmdline(pid)
    )
    return pid


def test_rewards_are_judged_on_every_host_and_outlive_their_processes(tmp_path: Path) -> None:
    assert not why_impossible()
    command = [
        *(sys.executable, "-m", "rollpacker.cli.main", "train", "configs/quickstart.yaml"),
        *("runtime=ray", "rewards_hosts.per_host=1", *PLACES, "train.steps=12"),
        *("data.train.size=400", "data.eval.size=20", "rollout.prompts_per_step=8"),
        "rollout.max_response_tokens=48",
        *(f"runs_dir={tmp_path}", f"model.path={model(tmp_path)}"),
    ]
    log, said = tmp_path / "quickstart" / "events.jsonl", tmp_path / "said"
    with Network(2) as network, said.open("w") as output:
        network.start_ray()
        process = network.popen(0, command, cwd=ROOT, stdout=output, stderr=output)
        until = time.monotonic() + 400
        for num_commits, host in ((2, 1), (5, 0)):
            while not log.exists() or log.read_text().count('"Committed"') < num_commits:
                assert time.monotonic() < until and process.poll() is None, said.read_text()
                time.sleep(0.1)
            os.kill(reward_host(network, host), signal.SIGKILL)
        assert process.wait(until - time.monotonic()) == 0, said.read_text()
        left = [cmdline(pid) for host in (0, 1) for pid in network.pids(host)]
        assert not any(b"host_worker" in one for one in left)
    told = " ".join(said.read_text().split())
    for number in (0, 1):
        assert f"reward host {number} on" in told
    assert told.count("is lost and begins anew") == 2
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    scored = [row for row in rows if row.get("event") == "SampleScored"]
    judged = Counter(one["sample"] for one in scored if one["value"] is not None)
    assert set(judged.values()) == {1}  # nobody twice
