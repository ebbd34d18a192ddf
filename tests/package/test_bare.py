"""The wheel in an environment with what it needs and nothing else, under each Python that it is for
and that is found here."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.package.conftest import ROOT
from tests.package.test_wheel import PROJECT

OF_ANOTHER_TRAINER = {"torch": "2.6.0", "transformers": "4.51.3"}
"""Packages that another trainer pins, which stand here as names and versions without contents."""

OWN = ".".join(platform.python_version_tuple()[:2])
PYTHONS = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))


def with_needs(lines: Iterable[str]) -> set[str]:
    """The names of the packages that these lines require, with what they need themselves."""
    found = set()
    for line in lines:
        if "extra ==" not in line and "python_version" not in line:
            name = re.split(r"[^A-Za-z0-9._-]", line)[0]
            found |= {name} | with_needs(distribution(name).requires or ())
    return found


@pytest.fixture(scope="module", params=PYTHONS)
def bare(
    request: pytest.FixtureRequest, built: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of an environment with the wheel and what it needs: under the Python that runs
    now by links, under another from the package index."""
    venv = tmp_path_factory.mktemp("bare") / "venv"
    (wheel,) = built.glob("*.whl")
    if request.param == OWN:
        link(venv, wheel)
    else:
        install(f"python{request.param}", venv, wheel)
    return venv


def install(python: str, venv: Path, wheel: Path) -> None:
    """Make the environment and install the wheel, as a user does."""
    if shutil.which(python) is None or subprocess.run([python, "-V"], check=False).returncode:
        pytest.skip(f"{python} is not found")
    began_s = time.perf_counter()
    subprocess.run([python, "-m", "venv", str(venv)], check=True)
    made_s = time.perf_counter()
    command = [str(venv / "bin/pip"), "install", "--disable-pip-version-check", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and "connection" in done.stderr:
        pytest.skip("the package index cannot be reached")
    assert done.returncode == 0, done.stderr
    seconds = f"{made_s - began_s:.0f} s, pip install {time.perf_counter() - made_s:.0f} s"
    print(f"{python}: {seconds}, {size_of(venv) / 1e6:.0f} MB")


def link(venv: Path, wheel: Path) -> None:
    """Make the environment by links to packages of this one. The wheel is installed without an
    index, so that it could not replace what another trainer pins."""
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
    pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin/python")]
    words = ["install", "--quiet", "--no-index", "--disable-pip-version-check", str(wheel)]
    subprocess.run([*pip, *words], check=True)  # says so if anything is missing
    subprocess.run([*pip, "check"], check=True)


def size_of(venv: Path) -> int:
    """Bytes of the packages, and of those that links lead to, without pip and compiled files."""
    (packages,) = venv.glob("lib/python*/site-packages")
    return sum(
        file.stat().st_size
        for top in packages.iterdir()
        for file in ([top] if top.is_file() else top.rglob("*"))
        if file.is_file() and "__pycache__" not in file.parts and not top.name.startswith("pip")
    )


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
    assert size_of(bare) < 120e6


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
