"""Ray's head is lost, three times in one run: the run says so and ends, and goes on when asked."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from benchmarks.exactly_once import check
from benchmarks.resume import write_config, write_model
from rollpacker.report.log import EventLog
from rollpacker.run.replay import replay
from tests.cluster.netns import Network, why_impossible
from tests.cluster.test_cluster import LEFT_S, ROOT, cmdline, pytestmark

__all__ = ["pytestmark"]
TIMES = 3
ENDED_S = 120.0
"""Ray itself ends the run after 60 s, with another exit code."""
OVERRIDES = (
    *("runtime=ray", "rollout.engines=2", "train.processes=1", "rewards_hosts.per_host=1"),
    *("rollout.max_response_tokens=200", "checkpoint.every_steps=3"),
)


def test_a_run_whose_head_is_killed_says_so_and_goes_on_with_resume(tmp_path: Path) -> None:
    assert not why_impossible()
    write_model(tmp_path / "model")
    config = write_config(tmp_path, 1_000_000)
    log, said = tmp_path / "runs" / "reference" / "events.jsonl", tmp_path / "said"
    train = [sys.executable, "-m", "rollpacker.cli.main", "train", str(config), *OVERRIDES]
    with Network(3, cores=1) as network, said.open("w") as output:

        def start(*arguments: str):
            return network.popen(0, [*train, *arguments], cwd=ROOT, stdout=output, stderr=output)

        for number in range(TIMES):
            network.start_ray()
            committed = num_commits(log)
            process = start(*(["--resume"] if number else []))
            until = time.monotonic() + 240
            while num_commits(log) < committed + 8:
                assert time.monotonic() < until and process.poll() is None, said.read_text()[-6000:]
                time.sleep(0.2)
            (head,) = network.named(0, "gcs_server")
            os.kill(head, signal.SIGKILL)
            assert process.wait(ENDED_S) == 6, said.read_text()[-6000:]
            told = " ".join(said.read_text().split())
            assert told.count("ray's head has not answered for") == number + 1
            assert told.count("go on with --resume") >= number + 1
            until = time.monotonic() + LEFT_S
            while left := [one for host in range(3) for one in of_the_run(network, host)]:
                assert time.monotonic() < until, left
                time.sleep(0.1)
            for host in range(3):
                network.kill_all(host)
        network.start_ray()
        last = start("--resume", f"train.steps={num_commits(log) + 5}")
        assert last.wait(300) == 0, said.read_text()[-6000:]
    assert check(log)["problems"] == []
    assert replay(EventLog(log)).difference is None


def num_commits(log: Path) -> int:
    return log.read_text().count('"Committed"') if log.exists() else 0


def of_the_run(network: Network, host: int) -> list[bytes]:
    lines = [cmdline(pid) for pid in network.pids(host)]
    ours = (b"\0rollpacker.", b"guardian.py", b"ray::Agent")
    return [line for line in lines if any(one in line for one in ours)]
