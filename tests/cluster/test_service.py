"""A cluster's service on ray over three hosts: jobs outlive it, its mailbox and a host's warden,
and no two are ever on one device."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollpacker.core.plain import to_plain
from tests.cluster.netns import Network, why_impossible
from tests.cluster.test_cluster import ROOT, pytestmark
from tests.cluster_service import fake_job
from tests.cluster_service.lab import job
from tests.cluster_service.witness import violations

__all__ = ["pytestmark"]
POOL = "devices_per_node: 1, price_per_device_h: 1, host_memory_gib: 4"
SPEC = f"""
name: lab
pools:
  - {{name: cheap, phase: rollout, nodes: 2, {POOL}}}
  - {{name: fast, phase: train, nodes: 1, {POOL}}}
link_gb_s: 1.0
"""
STEPS = 25
HAND_IN = """
import json, sys
from pathlib import Path
from rollpacker.cli.cluster_desk import Desk
print(json.dumps(Desk(Path("runs/lab-cluster")).ask("submit", json.loads(sys.argv[1]))))
"""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if why := why_impossible():
        pytest.fail(why)
    with Network(3) as network:
        for host, pool in enumerate(("fast", "cheap", "cheap")):
            network.start_ray([host], resources={f"pool_{pool}": 1})
        yield network


class Lab:
    """The service on the first host, and the commands beside it."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network, self.folder = network, folder
        (folder / "lab.yaml").write_text(SPEC)
        (folder / "devices").mkdir()
        self.environ = {**network.environment, "PYTHONPATH": str(ROOT)}
        self.said = folder / "said"

    def serve(self) -> float:
        """Seconds until it answers."""
        began = time.monotonic()
        command = [sys.executable, "-m", "rollpacker.cli.main", "cluster", "serve", "lab.yaml"]
        with self.said.open("a") as output:
            self.network.popen(
                0, command, cwd=self.folder, env=self.environ, stdout=output, stderr=output
            )
        count = self.said.read_text().count("its folder is")
        self.until(lambda: self.said.read_text().count("its folder is") > count)
        return time.monotonic() - began

    def run(self, *arguments: str) -> Any:
        """The JSON that a command prints, on the last line or from the first bracket on."""
        command = [sys.executable, *arguments]
        done = self.network.run(0, command, cwd=self.folder, env=self.environ)
        assert done.returncode == 0, (done.stdout, self.said.read_text())
        lines = done.stdout.splitlines()
        first = next(
            n for n, line in enumerate(lines) if line[:1] in ("[", "{") and "W " not in line
        )
        return json.loads("\n".join(lines[first:]))

    def jobs(self) -> dict[str, Any]:
        found = self.run("-m", "rollpacker.cli.main", "cluster", "top", "--json")
        return {job["job"]: job for job in found["jobs"]}

    def submit(self, name: str) -> Any:
        own = self.folder / name
        own.mkdir()
        numbers = (str(STEPS), "0.3", "0.2")
        facts = {
            "job": to_plain(job(name, STEPS, 0.3, 0.2)),
            "command": [
                sys.executable,
                fake_job.__file__,
                str(own),
                f"{self.folder}/devices",
                *numbers,
            ],
            "resume": [],
            "environ": {"PYTHONPATH": str(ROOT)},
            "folder": str(own),
            "run": str(own),
        }
        return self.run("-c", HAND_IN, json.dumps(facts))

    def commits(self, name: str) -> list[dict[str, Any]]:
        return fake_job.committed(self.folder / name)

    def strike(self, host: int, part: str) -> None:
        pids = self.network.named(host, part)
        assert pids, part
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def goes_on(self) -> None:
        """Both jobs commit twice more."""
        before = {name: len(self.commits(name)) for name in ("one", "two")}
        self.until(
            lambda: all(len(self.commits(n)) >= min(c + 2, STEPS) for n, c in before.items())
        )

    def until(self, holds: Callable[[], object], within_s: float = 120.0) -> None:
        end = time.monotonic() + within_s
        while not holds():
            assert time.monotonic() < end, self.said.read_text()[-4000:]
            time.sleep(0.05)


def test_jobs_outlive_service_mailbox_and_wardens(network: Network, tmp_path: Path) -> None:
    lab = Lab(network, tmp_path)
    print("served after", lab.serve())
    one, two = lab.submit("one"), lab.submit("two")
    assert (one["state"], two["state"]) == ("running", "running"), (one, two)
    assert one["train_nodes"] == ["fast/0"]
    lab.goes_on()
    assert network.named(0, "fake_job.py"), "jobs run where their training is"

    lab.strike(0, "cluster\0serve")
    print("served again after", lab.serve())
    lab.goes_on()
    lab.strike(0, "ray::Boxes")
    lab.goes_on()
    lab.strike(0, "ray::Warden")
    lab.goes_on()
    lab.strike(0, f"{tmp_path}/one\0{tmp_path}/devices")
    lab.goes_on()

    lab.until(lambda: {one["state"] for one in lab.jobs().values()} == {"done"}, 200.0)
    assert violations(tmp_path / "devices") == []
    for name in ("one", "two"):
        state = ""
        for step, line in enumerate(lab.commits(name), start=1):
            state = fake_job.following(state, step)
            assert (line["step"], line["state"]) == (step, state)
        assert step == STEPS
    assert lab.jobs()["one"]["incarnation"] == 2 and lab.jobs()["two"]["incarnation"] == 1
    hosts = json.loads((tmp_path / "runs/lab-cluster/nodes.json").read_text())
    assert hosts["fast/0"] == network.addresses[0]
    assert set(hosts.values()) <= set(network.addresses)
    assert not [n for host in range(3) for n in network.named(host, "fake_job.py")]
