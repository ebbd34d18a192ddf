"""What the page on clusters gives for SLURM and KubeRay, which no test can run here."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import yaml

from rollpacker.workers.hosts.token import MODE, PATH
from tests.docs.blocks import ROOT, Block, blocks

PAGE = ROOT / "docs" / "cluster.md"


def block(language: str) -> Block:
    (found,) = (one for one in blocks(PAGE) if one.language == language)
    return found


def ray_options() -> set[str]:
    """Of `ray start`, as it is installed."""
    scripts = pytest.importorskip("ray.scripts.scripts", reason="runtime=ray needs it")
    return {option for one in scripts.start.params for option in one.opts}


def cluster() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(block("yml").text)
    return found


def test_the_page_says_that_neither_was_run() -> None:
    assert "**Neither was run**" in PAGE.read_text("utf-8")


def test_the_batch_script_is_bash_and_asks_for_a_token() -> None:
    script = block("bash").text
    read = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert (read.returncode, read.stderr) == (0, "")
    assert f"{MODE}=token" in script and "RAY_AUTH_TOKEN=" not in script
    assert script.count("ray start") == 2 and script.count("--include-dashboard=false") == 1


def test_ray_start_has_the_options_of_both() -> None:
    known = ray_options()
    lines = [line for line in block("bash").text.splitlines() if "ray start" in line]
    words = {word for line in lines for word in line.partition("ray start")[2].split()}
    asked = {word.partition("=")[0] for word in words if word.startswith("--")}
    specs = [cluster()["spec"]["headGroupSpec"], *cluster()["spec"]["workerGroupSpecs"]]
    asked |= {f"--{name}" for one in specs for name in one["rayStartParams"]}
    assert {"--head", "--address", "--include-dashboard"} <= asked <= known


def test_pods_have_the_token_as_a_file_that_only_their_user_reads_and_shared_memory() -> None:
    specs = [cluster()["spec"]["headGroupSpec"], *cluster()["spec"]["workerGroupSpecs"]]
    assert len(specs) == 2
    for pod in (one["template"]["spec"] for one in specs):
        (container,) = pod["containers"]
        variables = {one["name"]: one["value"] for one in container["env"]}
        mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
        volumes = {one["name"]: one for one in pod["volumes"]}
        assert mounts.keys() == volumes.keys()
        assert variables == {MODE: "token", PATH: f"{mounts['token']}/token"}
        assert volumes["token"]["secret"]["defaultMode"] & 0o077 == 0
        assert mounts["shm"] == "/dev/shm" and volumes["shm"]["emptyDir"]["medium"] == "Memory"
