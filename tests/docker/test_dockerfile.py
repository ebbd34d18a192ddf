"""The Dockerfile's steps: what they copy exists and is sent to the daemon, and how they read."""

from __future__ import annotations

import fnmatch
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("try_steps", ROOT / "docker/try_steps.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["try_steps"] = module  # its dataclasses look themselves up here
    spec.loader.exec_module(module)
    return module


try_steps = load()
STEPS = try_steps.steps((ROOT / "docker/Dockerfile").read_text())


def test_what_is_copied_exists_and_is_not_ignored() -> None:
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    sent = {line.removeprefix("!") for line in ignore if line.startswith("!")}
    assert "*" in ignore
    sources = [
        source
        for name, rest in STEPS
        if name == "COPY" and "--from" not in rest
        for source in rest.split()[:-1]
    ]
    assert {"rollpacker", "configs", "examples", "pyproject.toml", "setup.py"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists()
        assert any(fnmatch.fnmatch(source, pattern) for pattern in sent), source


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_an_image_runs_the_command_as_a_user(target: str) -> None:
    wanted = try_steps.needed(STEPS, target)
    assert wanted == {"build", "cpu", target}
    stage, found = "", {}
    for name, rest in STEPS:
        stage = rest.partition(" AS ")[2] if name == "FROM" else stage
        if stage in wanted:
            found[name] = rest
    assert found["USER"] == "rollpacker"
    assert found["ENTRYPOINT"] == '["rollpacker"]'
    assert any("bubblewrap" in rest for name, rest in STEPS if name == "RUN")


def test_steps_are_read_with_their_continuations() -> None:
    text = "# comment\nFROM a AS b\nRUN one \\\n    # inside\n    && two\n\nENV A=1 B='2 3'\n"
    assert try_steps.steps(text) == [
        ("FROM", "a AS b"),
        ("RUN", "one      && two"),
        ("ENV", "A=1 B='2 3'"),
    ]
    with pytest.raises(SystemExit, match="the stages are b"):
        try_steps.needed(try_steps.steps(text), "c")


def test_arguments_and_copies(tmp_path: Path) -> None:
    build = try_steps.Build(tmp_path, tmp_path / "none.tar", (), {"VERSION": "2"})
    build.stage = try_steps.Stage(tmp_path / "stage")
    for step in (
        ("ARG", "VERSION=1"),
        ("ARG", "OTHER=1"),
        ("ENV", "PATH=/x:$PATH NAME=$VERSION"),
        ("WORKDIR", "/source"),
        ("COPY", "pyproject.toml README.md ./"),
        ("COPY", "configs configs"),
        ("ENTRYPOINT", '["rollpacker"]'),
    ):
        build.take(*step)
    assert build.stage.arguments == {"VERSION": "2", "OTHER": "1"}
    assert build.stage.environment["NAME"] == "2"
    assert build.stage.environment["PATH"].startswith("/x:/usr/local/sbin")
    made = tmp_path / "stage" / "source"
    assert {path.name for path in made.iterdir()} == {"configs", "pyproject.toml", "README.md"}
    assert (made / "configs" / "quickstart.yaml").exists()
    with pytest.raises(SystemExit, match="HEALTHCHECK is not known"):
        build.take("HEALTHCHECK", "NONE")
