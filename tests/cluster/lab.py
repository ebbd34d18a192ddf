"""A cluster's service on a network of hosts, with made-up jobs (`cluster_service/fake_job.py`).

Devices are files that all hosts have in common: whoever computes holds one (`witness.py`)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from rollpacker.cluster.decide.job import ClusterJob
from rollpacker.codec import to_plain
from tests.cluster.netns import Network
from tests.cluster_service import fake_job
from tests.cluster_service.witness import violations

ROOT = Path(__file__).parents[2]
_POOL = "devices_per_node: 1, price_per_device_h: 1, host_memory_gib: 100"


def spec(rollout_nodes: int, train_nodes: int) -> str:
    """A cluster's file, with so many nodes of one device."""
    return f"""
name: lab
pools:
  - {{name: cheap, phase: rollout, nodes: {rollout_nodes}, {_POOL}}}
  - {{name: fast, phase: train, nodes: {train_nodes}, {_POOL}}}
link_gb_s: 1.0
max_group: 8
slo_confidence: 0.9
"""


class RayLab:
    """The service on the first host, and the commands beside it."""

    def __init__(self, network: Network, folder: Path, nodes: tuple[int, int]) -> None:
        """`nodes`: of rollout and of training."""
        self.network, self.folder = network, folder
        self.devices = folder / "devices"
        self.devices.mkdir()
        self.own = folder / "runs" / "lab-cluster"
        """The service's; on each other host, if they are apart, its warden's."""
        (folder / "lab.yaml").write_text(spec(*nodes))
        self.environ = {**network.environment, "PYTHONPATH": str(ROOT)}
        self.said = folder / "said"
        self.jobs: dict[str, int] = {}
        """Steps of those that were submitted."""
        self._desk: subprocess.Popen[str] | None = None

    def start_ray(self, pools: Sequence[str]) -> None:
        """On hosts that are apart, each of one of these pools: the head, then all others.
        What their wardens know is their own."""
        if not self.own.exists():
            self.own.mkdir(parents=True)
            for host in range(1, len(pools)):
                self.network.own_folder(host, self.own)

        def start(host: int) -> None:
            self.network.start_ray([host], resources={f"pool_{pools[host]}": 1})

        start(0)
        in_threads([partial(start, host) for host in range(1, len(pools))])

    # -- the service -----------------------------------------------------------------------

    def serve(self) -> float:
        """Seconds until it answers."""
        began = time.monotonic()
        count = self.said.read_text().count("its folder is") if self.said.exists() else 0
        command = [sys.executable, "-m", "rollpacker.cli.main", "cluster", "serve", "lab.yaml"]
        with self.said.open("a") as output:
            self.network.popen(
                0, command, cwd=self.folder, env=self.environ, stdout=output, stderr=output
            )
        self.until(lambda: self.said.read_text().count("its folder is") > count)
        return time.monotonic() - began

    def ask(self, kind: str, **facts: Any) -> Any:
        """The answer of the service, after as many tries as it takes."""
        return self.until(lambda: self._ask(kind, facts), within_s=180.0)

    def _ask(self, kind: str, facts: Any) -> Any:
        if self._desk is None or self._desk.poll() is not None:
            command = [sys.executable, "-m", "tests.cluster.desk", str(self.own)]
            self._desk = self.network.popen(
                0,
                command,
                cwd=ROOT,
                env=self.environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        assert self._desk.stdin and self._desk.stdout
        with contextlib.suppress(BrokenPipeError):
            self._desk.stdin.write(json.dumps({"kind": kind, "facts": facts}) + "\n")
            self._desk.stdin.flush()
        for line in self._desk.stdout:
            if line.startswith("=> "):
                answer = json.loads(line[3:])
                assert "does not answer" in answer.get("refused", "does not answer"), answer
                return None if "refused" in answer else answer
        self._desk.wait()
        return None

    def close(self) -> None:
        self.strike(0, "tests.cluster.desk")

    # -- jobs --------------------------------------------------------------------------------

    def submit(self, job: ClusterJob) -> Any:
        own = self.folder / job.name
        own.mkdir()
        mean = job.mean
        numbers = [str(job.steps), str(mean.rollout_s), str(mean.train_s)]
        self.jobs[job.name] = job.steps
        return self.ask(
            "submit",
            job=to_plain(job),
            command=[sys.executable, fake_job.__file__, str(own), str(self.devices), *numbers],
            resume=[],
            environ={"PYTHONPATH": str(ROOT)},
            folder=str(own),
            run=str(own),
        )

    def status(self) -> dict[str, Any]:
        return {job["job"]: job for job in self.ask("status")["jobs"]}

    def commits(self, name: str) -> list[dict[str, Any]]:
        return fake_job.committed(self.folder / name)

    def goes_on(self, *names: str, more: int = 2, within_s: float = 120.0) -> None:
        """These jobs commit some more, or are done."""
        aim = {n: min(len(self.commits(n)) + more, self.jobs[n]) for n in names or self.jobs}
        self.until(lambda: all(len(self.commits(n)) >= c for n, c in aim.items()), within_s)

    def problems(self) -> list[str]:
        """Two on one device; of every job iterations lost, doubled, or made of something else."""
        found = violations(self.devices)
        for name in self.jobs:
            state = ""
            for step, line in enumerate(self.commits(name), start=1):
                state = fake_job.following(state, step)
                if (line["step"], line["state"]) != (step, state):
                    found.append(f"{name}: {line} is step {step}")
                    break
        return found

    # -- what goes wrong -----------------------------------------------------------------------

    def pids(self, host: int, name: str) -> list[int]:
        """Of a job's processes there; not of its keeper."""
        found = set(self.network.named(host, f"{self.folder}/{name}"))
        found |= set(self.network.named(host, f"engine\0{self.devices}"))
        return sorted(found - set(self.network.named(host, "keeper.py")))

    def strike(self, host: int, part: str, number: int = signal.SIGKILL) -> int:
        """Send a signal to all there whose command line has this part. Returns how many."""
        return send(self.network.named(host, part), number)

    def until(self, holds: Callable[[], Any], within_s: float = 120.0) -> Any:
        """What it returns once that is true."""
        end = time.monotonic() + within_s
        while not (found := holds()):
            assert time.monotonic() < end, self.said.read_text()[-6000:]
            time.sleep(0.05)
        return found


def send(pids: list[int], number: int) -> int:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return len(pids)


def in_threads(works: Sequence[Callable[[], object]]) -> None:
    """Two at a time, to their end."""
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(work) for work in works]:
            done.result()
