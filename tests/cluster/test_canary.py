"""Secrets in the environments of a run and of its cluster: who has them, and what holds them."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import yaml

from benchmarks.resume import write_config, write_model
from examples.code.tasks import code_tasks
from tests.cluster.netns import Network, why_impossible
from tests.cluster.test_cluster import ROOT, pytestmark

__all__ = ["pytestmark"]
NAME = "SOME_API_KEY"
REWARD = """
import os, pathlib

def look(completions, **columns):
    pathlib.Path({folder!r}, str(os.getpid())).write_text(repr(dict(os.environ)))
    return [len(set(text)) / 20 for text in completions]
"""
STARTED = (
    *(b"rollpacker.engines.engine_worker", b"rollpacker.trainer.worker"),
    *(b"rollpacker.rewards.host_worker", b"worker_program"),
)
OVER_HOSTS = (
    *("runtime=ray", "rewards_hosts.per_host=1", "checkpoint.every_steps=2"),
    *("placement.train.devices=0,5", "placement.rollout.devices=2,4"),
)


def test_a_secret_is_in_no_sandbox_log_or_checkpoint_and_rays_token_nowhere(
    tmp_path: Path, monkeypatch
) -> None:
    assert not why_impossible()
    of_ray, of_run = secrets.token_hex(16), secrets.token_hex(16)
    seen = tmp_path / "seen"
    seen.mkdir()
    said, run = tmp_path / "said", tmp_path / "runs" / "reference"
    train = ["-m", "rollpacker.cli.main", "train", str(config(tmp_path, seen)), *OVER_HOSTS]
    monkeypatch.setenv(NAME, of_ray)
    with Network(3) as network, said.open("w") as output:
        network.start_ray()
        process = network.popen(
            0,
            [sys.executable, *train],
            env={**network.environment, NAME: of_run},
            cwd=ROOT,
            stdout=output,
            stderr=output,
        )
        until = time.monotonic() + 300
        while num_commits(run) < 6 or len(list(seen.iterdir())) < 3:
            assert time.monotonic() < until and process.poll() is None, said.read_text()[-6000:]
            time.sleep(0.2)
        token = network.token.read_text()
        there = processes(network)
        os.kill(driver(there), signal.SIGINT)
        assert process.wait(200) == 130, said.read_text()[-6000:]
        kept = [said, *(one for one in run.rglob("*") if one.is_file())]

    boxes = [one for one in there.values() if b"bwrap" in one.command or b"zygote" in one.command]
    assert {one.host for one in boxes} >= {1, 2}, "each reward host has a sandbox of its own"
    for one in boxes:
        assert of_ray.encode() not in one.environment and of_run.encode() not in one.environment
    for one in there.values():
        assert token.encode() not in one.environment, one
        if one.host:
            assert of_run.encode() not in one.environment, one
    started = [one for one in there.values() if any(part in one.command for part in STARTED)]
    assert len(started) >= 8, "engines, ranks, reward hosts, and workers of these"
    for one in started:
        assert b"\0RAY_" not in b"\0" + one.environment, one
    assert len(kept) > 20
    for held in (one.read_bytes() for one in kept):
        assert of_ray.encode() not in held and of_run.encode() not in held
    for held in (one.read_bytes() for one in (*kept, *seen.iterdir())):
        assert token.encode() not in held and b"RAY_AUTH" not in held


def config(folder: Path, seen: Path) -> Path:
    """A run whose rewards are a function that leaves its environment in `seen`, and programs."""
    write_model(folder / "model")
    path = write_config(folder, steps=1000)
    (folder / "reward.py").write_text(REWARD.format(folder=str(seen)))
    rows = [{**row, "prompt": f"{n}+{n % 7}="} for n, row in enumerate(code_tasks(40, seed=0))]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = yaml.safe_load(path.read_text())
    settings["rewards"] = [{"function": f"{folder / 'reward.py'}:look"}, {"function": "code"}]
    path.write_text(yaml.safe_dump(settings))
    return path


def num_commits(run: Path) -> int:
    log = run / "events.jsonl"
    return log.read_text().count('"Committed"') if log.exists() else 0


class Seen(NamedTuple):
    """A process."""

    host: int
    command: bytes
    environment: bytes


def processes(network: Network) -> dict[int, Seen]:
    """All of all hosts by pid, those in sandboxes included, which have networks of their own."""
    hosts = {pid: host for host in range(3) for pid in network.pids(host)}
    parents = {int(one.name): parent(one) for one in Path("/proc").iterdir() if one.name.isdigit()}
    found = {}
    for pid in parents:
        above = pid
        while above and above not in hosts:
            above = parents.get(above, 0)
        with contextlib.suppress(OSError):
            if above:
                own = Path(f"/proc/{pid}")
                command, environment = (own / name for name in ("cmdline", "environ"))
                found[pid] = Seen(hosts[above], command.read_bytes(), environment.read_bytes())
    return found


def parent(process: Path) -> int:
    with contextlib.suppress(OSError):
        return int((process / "status").read_text().partition("PPid:")[2].split()[0])
    return 0


def driver(there: Mapping[int, Seen]) -> int:
    """The run's own process."""
    (pid,) = (pid for pid, one in there.items() if one.command.count(b"rollpacker.cli.main") == 1)
    return pid
