"""A run over three hosts, network namespaces of this machine with a ray of their own: `make
test-cluster`, in the environment of `make cluster`. Skipped elsewhere."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.resume import write_config, write_model
from tests.cluster.netns import Network, why_impossible

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.skipif(
        "ROLLPACKER_TEST_CLUSTER" not in os.environ or find_spec("ray") is None,
        reason="make test-cluster runs it",
    ),
    pytest.mark.timeout(900),
]
LEFT_S = 15.0
"""Within which nothing may be left of a run that was killed."""
GAIN = 0.30


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if why := why_impossible():
        pytest.fail(why)
    with Network(3) as network:
        network.start_ray()
        yield network


def run_tests(network: Network, *arguments: str, **variables: str) -> str:
    """Run tests on the first host, and return what they print."""
    environment = {
        **network.environment,
        **variables,
        "ROLLPACKER_PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
    }
    done = network.run(
        0, [sys.executable, "-m", "pytest", "-s", *arguments], cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def train(network: Network, *overrides: str, config: str = "configs/quickstart-vllm.yaml"):
    command = [sys.executable, "-m", "rollpacker.cli.main", "train", config, *overrides]
    return network.popen(0, command, cwd=ROOT, stdout=-1, stderr=-2, text=True)


@pytest.mark.parametrize("kind", ["embedded", *(["vLLM"] if find_spec("vllm") else [])])
def test_an_engine_on_another_host_is_what_every_engine_is(network, kind):
    said = run_tests(
        network, "tests/engines/test_conformance.py", ROLLPACKER_ENGINE_BEHIND_RAY=kind
    )
    assert int(re.search(r"(\d+) passed", said).group(1)) >= 15


def test_ranks_weights_and_doors(network):
    switch = network.switch
    network.slow(1, 100)
    cut = f"nsenter --net=/run/netns/{switch} ip link set p1 down"
    run_tests(network, "tests/cluster/inside.py", ROLLPACKER_SLOW="1", ROLLPACKER_CUT=cut)
    network.kill_all(1)  # ray has given it up
    network.fast(1)
    network.mend(1)
    network.start_ray([1])


def test_nothing_is_left_of_a_run_that_is_killed(network, tmp_path):
    write_model(tmp_path / "model")
    config = write_config(tmp_path, steps=500)
    before = {host: set(network.pids(host)) for host in range(3)}
    process = train(
        network,
        *("runtime=ray", "rollout.engines=2", "train.processes=2"),
        *("rollout.max_response_tokens=300", "checkpoint.every_steps=50"),
        config=str(config),
    )
    log = tmp_path / "runs" / "reference" / "events.jsonl"
    until = time.monotonic() + 240
    while not (log.exists() and '"Committed"' in log.read_text()):
        assert time.monotonic() < until and process.poll() is None, process.stdout.read()
        time.sleep(0.2)
    assert sum(b"engine_worker" in cmdline(pid) for pid in network.pids(1)) >= 2
    os.kill(process.pid, signal.SIGKILL)
    until = time.monotonic() + LEFT_S
    while left := {
        pid
        for host in range(3)
        for pid in set(network.pids(host)) - before[host]
        if b"rollpacker" in cmdline(pid) or b"ray::Agent" in cmdline(pid)
    }:
        assert time.monotonic() < until, [cmdline(pid) for pid in left]
        time.sleep(0.1)


def test_the_trainer_may_be_on_another_host_than_the_run(network, tmp_path):
    """The run's host has one engine, the second the other, and the third all of the trainer."""
    write_model(tmp_path / "model")
    process = train(
        network,
        *("runtime=ray", "rollout.engines=2", "train.processes=2", "train.steps=6"),
        "placement={rollout: {devices: '0,2'}, train: {devices: 4-5}}",
        config=str(write_config(tmp_path, steps=6)),
    )
    seen = [set[bytes](), set[bytes](), set[bytes]()]
    while process.poll() is None:
        for host, found in enumerate(seen):
            for pid in network.pids(host):
                found |= {w for w in (b"engine_worker", b"trainer.worker") if w in cmdline(pid)}
        time.sleep(0.1)
    said, _ = process.communicate()
    assert process.returncode == 0, said[-4000:]
    assert seen == [{b"engine_worker"}, {b"engine_worker"}, {b"trainer.worker"}]
    log = (tmp_path / "runs" / "reference" / "events.jsonl").read_text()
    assert log.count('"Committed"') == 6


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.skipif(find_spec("vllm") is None, reason="make cluster has vLLM")
def test_a_run_over_three_hosts_learns_on_the_prompts_of_a_local_one(network, tmp_path):
    subprocess.run([sys.executable, "examples/quickstart/make_demonstrations.py"], cwd=ROOT)
    warm = tmp_path / "warm"
    subprocess.run(
        [
            *(sys.executable, "-m", "rollpacker.cli.main", "warmup"),
            *("configs/quickstart-vllm-warmup.yaml", f"output={warm}"),
        ],
        cwd=ROOT,
        check=True,
    )
    common = (
        *(f"runs_dir={tmp_path}", f"model.path={warm}", "rollout.engines=2", "train.processes=2"),
    )
    process = train(network, "runtime=ray", "name=ray", *common)
    said, _ = process.communicate(timeout=800)
    assert process.returncode == 0, said[-4000:]
    passed = [
        row["eval/pass@1"]
        for row in map(json.loads, (tmp_path / "ray/metrics.jsonl").read_text().splitlines())
        if "eval/pass@1" in row
    ]
    print("pass@1", passed)
    assert passed[-1] - passed[0] >= GAIN
    local = train(network, "name=local", "train.steps=20", "data.eval_fraction=0", *common)
    assert local.wait(600) == 0
    assert prompts(tmp_path / "local", 20) <= prompts(tmp_path / "ray", 40)


def prompts(run: Path, steps: int) -> set[str]:
    """Those fetched by a run in its first steps."""
    found: set[str] = set()
    committed = 0
    for line in (run / "events.jsonl").read_text().splitlines():
        if '"PromptsFetched"' in line:
            found |= set(re.findall(r"train/\d+/\d+", line))
        committed += '"Committed"' in line
        if committed >= steps:
            break
    return found
