"""The wheel in an environment with what it needs and nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.package.conftest import ROOT
from tests.package.test_wheel import PROJECT

OF_ANOTHER_TRAINER = {"torch": "2.6.0", "transformers": "4.51.3"}
"""Packages that another trainer pins, which stand here as names and versions without contents."""


def with_needs(lines: Iterable[str]) -> set[str]:
    """The names of the packages that these lines require, with what they need themselves."""
    found = set()
    for line in lines:
        if "extra ==" not in line and "python_version" not in line:
            name = re.split(r"[^A-Za-z0-9._-]", line)[0]
            found |= {name} | with_needs(distribution(name).requires or ())
    return found


@pytest.fixture(scope="module")
def bare(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an environment with the wheel and, by links, what it needs. The wheel is
    installed without an index, so that it could not replace what another trainer pins."""
    venv = tmp_path_factory.mktemp("bare") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    for name in with_needs(PROJECT["dependencies"]):
        for file in distribution(name).files or ():
            top = file.parts[0]
            if top != ".." and not (packages / top).exists():
                (packages / top).symlink_to(Path(str(distribution(name).locate_file(top))))
    for name, version in OF_ANOTHER_TRAINER.items():
        info = packages / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (wheel,) = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin/python")]
    install = ["install", "--quiet", "--no-index", "--disable-pip-version-check", str(wheel)]
    subprocess.run([*pip, *install], check=True)  # says so if anything is missing
    subprocess.run([*pip, "check"], check=True)
    return venv


def run(bare: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(bare / "bin" / words[0]), *words[1:]],
        cwd=bare,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_it_is_small(bare: Path) -> None:
    (packages,) = bare.glob("lib/python*/site-packages")
    size = sum(
        file.stat().st_size
        for top in packages.iterdir()
        for file in ([top] if top.is_file() else top.rglob("*"))
        if file.is_file() and "__pycache__" not in file.parts
    )
    assert size < 120e6


def test_what_needs_no_training_runs(bare: Path) -> None:
    scenario = ROOT / "configs" / "scenarios" / "7b-8k.yaml"
    done = run(bare, "rollpacker", "simulate", str(scenario), "steps=20", "--no-picture")
    assert done.returncode == 0, done.stderr
    assert "of all device time" in done.stdout
    done = run(bare, "python", str(ROOT / "examples" / "scheduler" / "own_trainer.py"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("rollpacker: 6 steps in ")


@pytest.mark.parametrize("verb", ["train", "warmup"])
def test_what_trains_says_what_it_lacks(bare: Path, verb: str) -> None:
    config = ROOT / "configs" / f"quickstart{'-warmup' if verb == 'warmup' else ''}.yaml"
    done = run(bare, "rollpacker", verb, str(config))
    assert done.returncode == 2
    needs = f"rollpacker {verb} needs torch, which is not installed"
    assert done.stderr == f"rollpacker: {needs}: pip install 'rollpacker[train]'\n"
