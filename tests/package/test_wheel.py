"""What is in the wheel and in the source archive, and that the wheel alone makes a run."""

from __future__ import annotations

import json
import subprocess
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
import yaml

from tests.package.conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def below(folder: str) -> set[str]:
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_has_the_package_and_the_templates_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    templates = {f"rollpacker/templates/{one}" for one in below("configs") | below("examples")}
    assert names == below("rollpacker") | templates
    assert wheel.stat().st_size < 3e6


def test_its_metadata_is_complete(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    (name,) = (one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
    metadata = message_from_bytes(archive.read(name))
    assert metadata["Version"] == PROJECT["version"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    assert set(metadata.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    assert metadata["Keywords"] and metadata.get_all("Classifier")
    assert "# RollPacker" in metadata.get_payload()


def test_the_version_stands_in_one_place() -> None:
    found = [
        path
        for path in (*(ROOT / "rollpacker").rglob("*.py"), ROOT / "setup.py")
        if f'"{PROJECT["version"]}"' in path.read_text("utf-8")
    ]
    assert found == []


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="compares with what git tracks")
def test_the_source_archive_is_the_repository(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = {one.name.partition("/")[2] for one in file.getmembers() if one.isfile()}
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    expected = {one for one in tracked if one and (ROOT / one).exists()}
    expected -= {one for one in expected if one.startswith(".")}
    made = {"PKG-INFO", "setup.cfg"} | {one for one in names if ".egg-info/" in one}
    assert names - made == expected


def test_an_empty_folder_to_a_report(command, tmp_path: Path) -> None:
    """The quickstart, cut short: what takes a minute of warming up is taken from overrides."""
    done = command(tmp_path, "init", "quickstart", "--files-only")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("arithmetic.py", "make_demonstrations.py", "quickstart-warmup.yaml", "quickstart.md"),
        "quickstart.yaml",
    ]
    warmup = yaml.safe_load((tmp_path / "quickstart-warmup.yaml").read_text())
    rows = [
        {"prompt": f"{a}+{b}=", "completion": f"{a}+{b}={a + b}"} for a in (1, 2) for b in (3, 4)
    ]
    place = tmp_path / warmup["stages"][0]["path"]
    place.parent.mkdir(parents=True)
    place.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stage = f"stages=[{{path: {warmup['stages'][0]['path']}, steps: 3, batch_size: 4}}]"
    short = ("data.train.size=40", "data.eval.size=8", "rollout.max_response_tokens=16")
    for words in (
        ("warmup", "quickstart-warmup.yaml", stage),
        ("train", "quickstart.yaml", "train.steps=2", "rollout.prompts_per_step=4", *short),
        ("eval", "runs/quickstart"),
        ("report", "runs/quickstart"),
    ):
        done = command(tmp_path, *words)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
    assert len((tmp_path / "runs/quickstart/metrics.jsonl").read_text().splitlines()) >= 2
    assert json.loads((tmp_path / "runs/quickstart/summary.json").read_text())


def test_every_template_is_in_the_wheel(command, tmp_path: Path) -> None:
    listed = command(tmp_path, "init", "--list").stdout.split("\n\n")[0].splitlines()
    names = [line.split()[0] for line in listed]
    assert {"quickstart", "own-data", "gsm8k-1.5b", "code-7b", "14b-16k"} <= set(names)
    for name in names:
        done = command(tmp_path, "init", name, name, "--files-only")
        assert done.returncode == 0, done.stderr
        assert (tmp_path / name / f"{name}.yaml").exists()
