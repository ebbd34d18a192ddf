"""A real ray of this machine with eight made-up GPUs: two runs and an agent, each process on its
own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="runtime=ray needs it")
ROOT = Path(__file__).parents[2]
GPUS = [f"GPU-{letter}" for letter in "abcdefgh"]
SMI = "#!/bin/sh\n" + "".join(f"echo '{n}, {name}-more, 81920'\n" for n, name in enumerate(GPUS))

RUN = """
import sys
from rollpacker.config.load import load_config
from rollpacker.config.schema import RunConfig
from rollpacker.run.parts.hosts import open_hosts


def seen(host, environment):
    process, line = host.start("tests.remote.echo", "echo", guarded=False, environment=environment)
    line.send(1, 7, b"CUDA_VISIBLE_DEVICES")
    names = line.receive(120.0).payload.decode()
    line.close()
    process.close()
    return names


def run(*lines):
    given = ["model.device=cuda", "model.path=nowhere", "rollout.engine.name=vllm", "runtime=ray"]
    config, hosts = open_hosts(load_config("configs/quickstart.yaml", [*given, *lines], RunConfig))
    degree = config.parallelism_planner.initial
    engines = [hosts.of_engine(number, degree) for number in range(config.rollout.engines)]
    ranks = [(place.host, place.environment) for place in hosts.of_ranks()]
    return hosts, [[seen(*one) for one in role] for role in (engines, ranks)]
"""

SECOND = """
import json
hosts, found = run("placement={rollout: {devices: 6-6}, train: {devices: 7-7}}")
print(json.dumps(found), file=open(sys.argv[1], "w"))
hosts.close()
"""

FIRST = """
import json, os, signal, subprocess
from rollpacker.workers.hosts.token import demand_token, make_token

make_token()
demand_token()
import ray

ray.init(address="local", num_gpus=8, include_dashboard=False, configure_logging=False)
from rollpacker.weights.between_hosts.spread import Spread
from rollpacker.workers.hosts.ray_agents import join
from rollpacker.workers.hosts.remote_host import RemoteHost

folder = sys.argv[1]
hosts, mine = run(
    "rollout.engines=1", "parallelism_planner={initial: 2, degrees: [2]}", "train.processes=2"
)
head = ray.get_runtime_context().gcs_address
program = os.environ["RUN"] + os.environ["SECOND"]
subprocess.run(
    [sys.executable, "-c", program, folder + "/second"],
    env={**os.environ, "RAY_ADDRESS": head},
    check=True,
)
cluster = join()
cluster.reserve({cluster.own_address: {"GPU": 2.0}}, within_s=60.0)
host = RemoteHost("there", cluster.connect(cluster.own_address), Spread(), heartbeat_s=5.0)
far = [seen(host, {"CUDA_VISIBLE_DEVICES": one}) for one in ("0,1", "1")]
process, line = host.start("tests.remote.echo", "echo", guarded=False, environment={})
line.send(2, 7)
line.receive(120.0)
os.kill(host.facts().pid, signal.SIGKILL)
assert process.how_ended(60.0) is not None
far.append(seen(host, {"CUDA_VISIBLE_DEVICES": "0,1"}))
found = {"first": mine, "own": cluster.own_gpus, "far": far}
print(json.dumps(found), file=open(folder + "/first", "w"))
host.close()
cluster.close()
hosts.close()
"""


@pytest.mark.timeout(280)
def test_two_runs_and_an_agent_have_the_gpus_that_ray_gave_each(tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(SMI)
    smi.chmod(0o755)
    environment = {name: one for name, one in os.environ.items() if not name.startswith("RAY_")}
    environment |= {
        "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token"),
        "CUDA_VISIBLE_DEVICES": ",".join(GPUS),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "RUN": RUN,
        "SECOND": SECOND,
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN + FIRST, str(tmp_path)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=270,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    first = json.loads((tmp_path / "first").read_text())
    [[engine], ranks] = first["first"]
    second = [one for role in json.loads((tmp_path / "second").read_text()) for one in role]
    both, one, again = first["far"]
    assert both == again == ",".join(first["own"]) and one == first["own"][1]
    of_first = {*engine.split(","), *ranks}
    assert len(of_first) == 4 and len({*second}) == 2 and of_first | {*second} < {*GPUS}
    assert not of_first & {*second} and not of_first & {*both.split(",")}
