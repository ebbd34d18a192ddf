"""What the page on many jobs gives for Slurm and KubeRay, which no test can run here."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollpacker.cli.verbs import build_parser
from rollpacker.cluster.sim.spec import load_cluster
from rollpacker.workers.hosts.token import MODE
from tests.docs.blocks import ROOT, Block, blocks, named_files

PAGE = ROOT / "docs" / "many-jobs.md"


def block(language: str) -> Block:
    (found,) = (one for one in blocks(PAGE) if one.language == language)
    return found


def cluster() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(block("yml").text)
    return found


def pool_of(resources: str) -> str:
    (name,) = json.loads(resources)
    return str(name).removeprefix("pool_")


def test_the_page_says_that_neither_was_run() -> None:
    assert "**Neither this nor the next was run**" in PAGE.read_text("utf-8")


def test_the_batch_script_is_bash_asks_for_a_token_and_names_the_pools() -> None:
    script = block("bash").text
    read = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert (read.returncode, read.stderr) == (0, "")
    assert f"{MODE}=token" in script and "RAY_AUTH_TOKEN=" not in script
    resources = re.findall(r"--resources='([^']*)'", script)
    assert [pool_of(one) for one in resources] == ["fast", "cheap"]
    assert script.count("ray start") == 2 and script.count("--include-dashboard=false") == 1


def test_the_batch_script_serves_as_many_nodes_as_it_has(tmp_path: Path) -> None:
    """Those of the file that the page begins with, but for their number."""
    script, file = block("bash").text, tmp_path / "lab.yaml"
    file.write_text(named_files(PAGE)["lab.yaml"])
    (serve,) = re.findall(r"rollpacker cluster serve lab.yaml (\S+=\S+) --folder", script)
    (num_nodes,) = re.findall(r"--nodes=(\d+)", script.splitlines()[0])
    pools = {pool.name: pool.nodes for pool in load_cluster(file, [serve]).pools}
    assert pools == {"cheap": int(num_nodes) - 1, "fast": 1}
    assert {pool.nodes for pool in load_cluster(file).pools} == {1}, "which --local takes"


def test_ray_start_has_the_options_of_both() -> None:
    scripts = pytest.importorskip("ray.scripts.scripts", reason="runtime=ray needs it")
    known = {option for one in scripts.start.params for option in one.opts}
    lines = [line for line in PAGE.read_text("utf-8").splitlines() if "ray start" in line]
    asked = {
        word for line in lines for word in re.findall(r"--[a-z-]+", line.split("ray start")[1])
    }
    specs = [cluster()["spec"]["headGroupSpec"], *cluster()["spec"]["workerGroupSpecs"]]
    asked |= {f"--{name}" for one in specs for name in one["rayStartParams"]}
    assert {"--head", "--address", "--resources"} <= asked <= known


def test_each_pool_has_a_worker_group_that_may_be_empty() -> None:
    spec = cluster()["spec"]
    assert spec["enableInTreeAutoscaling"] is True
    for group in spec["workerGroupSpecs"]:
        resources = json.loads(group["rayStartParams"]["resources"])  # quoted for a shell
        assert pool_of(resources) == group["groupName"]
        assert group["minReplicas"] == 0 < group["maxReplicas"]


def test_every_command_of_the_page_is_one() -> None:
    text = PAGE.read_text("utf-8")
    lines = re.findall(r"^ {4}rollpacker (cluster .*)$", text, re.MULTILINE)
    assert len(lines) >= 5
    for line in lines:
        build_parser().parse_args(shlex.split(line))
    table = {word.split()[0] for word in re.findall(r"^\| `([a-z]+[^`]*)` \|", text, re.MULTILINE)}
    actions = {"submit", "jobs", "show", "top", "cancel", "drain"}
    assert actions <= table
