"""A real ray of this machine alone: what of its interface is used, in one process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="runtime=ray needs it")
ROOT = Path(__file__).parents[2]

PROGRAM = """
import os, signal, time
from rollpacker.workers.hosts.remote_host import RemoteHost
from rollpacker.weights.between_hosts.spread import Spread
from rollpacker.workers.hosts.token import demand_token, make_token

said = open(os.environ["SAID"], "w")  # to the standard output ray writes, too
before = signal.getsignal(signal.SIGTERM)
make_token()
demand_token()
from rollpacker.workers.hosts.ray_agents import join

cluster = join()
assert signal.getsignal(signal.SIGTERM) is before, "ray's own would end a step in the middle"
(node,) = cluster.nodes.values()
facts = cluster.facts(node.address)
assert cluster.sees(node.address, os.getcwd()) and not cluster.sees(node.address, "/no/such")
assert cluster.has_head()
try:
    cluster.reserve({node.address: {"CPU": 1000.0}}, within_s=1.0)
except ValueError as error:
    print("refused:", error, file=said)
cluster.reserve({node.address: {"CPU": 1.0}}, within_s=60.0)
spread = Spread()
host = RemoteHost("there", cluster.connect(node.address), spread, heartbeat_s=5.0)


def echoes() -> None:
    process, line = host.start("tests.remote.echo", "echo", guarded=False, environment={})
    line.send(1, 7, b"RAY_AUTH_MODE")
    assert line.receive(120.0).payload == b"", "ray's variables are the agent's alone"
    return process, line


process, line = echoes()
first = host.facts().pid
os.kill(first, signal.SIGKILL)
how = process.how_ended(60.0)
print("lost:", how, file=said)
echoes()
assert host.facts().pid != first
host.close()
cluster.close()
print("done", file=said)
said.close()
"""


@pytest.mark.timeout(280)
def test_an_agent_is_started_called_killed_and_started_again(tmp_path: Path) -> None:
    environment = {name: one for name, one in os.environ.items() if not name.startswith("RAY_")}
    environment |= {
        "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token"),
        "RAY_ADDRESS": "local",
        "PYTHONPATH": str(ROOT),
        "SAID": str(tmp_path / "said"),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=270,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    refused, lost, last = (tmp_path / "said").read_text().splitlines()
    assert "could not reserve 1000 CPU on" in refused and "Wait for the others" in refused
    assert lost.startswith("lost: The actor") and last == "done"
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
