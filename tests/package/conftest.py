"""The wheel and the source archive, built once; and an environment that has the wheel."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOT_OURS = (
    *(".git", ".venv*", ".cache", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info"),
    *("build", "dist", "runs", "shared", "site"),
)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the wheel and the source archive, built from a copy of the checkout."""
    folder = tmp_path_factory.mktemp("built")
    shutil.copytree(ROOT, folder / "source", ignore=shutil.ignore_patterns(*NOT_OURS))
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist")],
        cwd=folder / "source",
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "dist"


@pytest.fixture(scope="session")
def command(
    built: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the installed `rollpacker` in a folder.

    Its environment has the wheel, and through a path file the packages of this one.
    """
    venv = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (wheel,) = built.glob("*.whl")
    install = ["install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(venv / "bin/python"), *install, str(wheel)],
        check=True,
    )
    (packages,) = venv.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}

    def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(venv / "bin/rollpacker"), *words],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
        )

    return run
