"""`rollpacker init`: every template's files, side by side; nothing of the user's is replaced."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from rollpacker.cli.init import prepare
from rollpacker.cli.main import main
from rollpacker.cli.templates import Template, find_template, root, templates
from rollpacker.cli.verbs import build_parser
from rollpacker.config.load import load_config
from rollpacker.config.schema import RunConfig
from rollpacker.config.warmup import WarmupConfig
from rollpacker.imports import load_function
from rollpacker.sim.scenario import load_scenario

ALL = templates()


def init(*words: str) -> int:
    return main(["init", *words])


def test_every_config_is_a_template_or_a_part_of_one() -> None:
    configs = {path.relative_to(root()).as_posix() for path in (root() / "configs").rglob("*.yaml")}
    clusters = {name for name in configs if name.startswith("configs/clusters/")}
    assert "configs/clusters/mixed.yaml" in clusters
    configs -= clusters  # where jobs go, and no jobs
    assert configs <= {source for one in ALL.values() for source in one.sources}
    assert all(one.about for one in ALL.values())
    assert ALL["quickstart"].steps() == (
        "python make_demonstrations.py",
        "rollpacker warmup quickstart-warmup.yaml",
        "rollpacker train quickstart.yaml",
    )
    assert ALL["quickstart"].preparation() == ALL["quickstart"].steps()[:2]
    assert ALL["gsm8k-1.5b"].preparation() == ()


@pytest.mark.parametrize("name", ALL)
def test_a_template_stands_on_its_own(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Its configs load, the functions in them are found, and its commands have their files."""
    monkeypatch.chdir(tmp_path)
    assert init(name, "--files-only") == 0
    said = capsys.readouterr().out
    assert not (tmp_path / "configs").exists()
    for path in tmp_path.glob("*.yaml"):
        text = path.read_text()
        assert "configs/" not in text
        if "cluster:" in text:
            load_scenario(path)
            continue
        config = load_config(path, [], WarmupConfig if "\nstages:" in text else RunConfig)
        for spec in re.findall(
            r"(?:_)?function: (\S+\.py:\w+)", yaml.safe_dump(yaml.safe_load(text))
        ):
            assert callable(load_function(spec)), config
    for step in ALL[name].steps():
        assert f"    {step}\n" in said
        program, *words = shlex.split(step)
        if program == "rollpacker":
            args = build_parser().parse_args(words)
            assert (tmp_path / (args.scenario if args.verb == "simulate" else args.config)).exists()
        else:
            assert (tmp_path / words[0]).exists()
    guide = (tmp_path / f"{name}.md").read_text()
    assert guide.startswith(f"# {name}\n") and len(guide.splitlines()) < 40


def test_into_a_folder_of_its_own(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert init("own-data", "my run") == 0
    assert {path.name for path in (tmp_path / "my run").iterdir()} == {
        *("own-data.yaml", "own-data.md", "questions.jsonl", "reward.py")
    }
    assert capsys.readouterr().out.endswith(
        "Next:\n    cd 'my run'\n    rollpacker doctor own-data.yaml\n"
        "    rollpacker train own-data.yaml\n"
    )


def test_what_is_there_is_not_replaced(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text("mine")
    assert init("own-data") == 2
    message = capsys.readouterr().err
    assert "reward.py is already in" in message and "--overwrite" in message
    assert [path.name for path in tmp_path.iterdir()] == ["reward.py"]
    assert (tmp_path / "reward.py").read_text() == "mine"
    assert init("own-data", "--overwrite") == 0
    assert "def names_the_city" in (tmp_path / "reward.py").read_text()
    assert init("own-data") == 0
    assert "already" in capsys.readouterr().out
    (tmp_path / "own-data.yaml").unlink()
    assert init("own-data") == 0
    assert "Wrote own-data.yaml to" in capsys.readouterr().out


def test_a_file_where_the_folder_should_be(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert init("own-data", "file") == 5
    assert "file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("quikstart", 'there is no template "quikstart". Did you mean "quickstart"?'),
        ("code", 'there are several templates "code-...": code-7b, code-tiny.'),
        ("zzz", "The templates are "),
    ],
)
def test_a_name_that_is_none(asked: str, message: str, capsys) -> None:
    assert init(asked) == 2
    assert message in capsys.readouterr().err
    assert find_template("gsm8k").name == "gsm8k-1.5b"


def test_a_name_is_needed(capsys) -> None:
    assert init() == 2
    assert "--list" in capsys.readouterr().err
    assert init("--list") == 0
    said = capsys.readouterr().out
    assert all(name in said for name in ALL)


class Failing(Template):
    """The second of three preparations fails."""

    def preparation(self) -> tuple[str, ...]:
        return ("python first.py", "python second.py", "rollpacker warmup third.yaml")


def test_a_preparation_that_fails_says_what_is_left(tmp_path: Path) -> None:
    (tmp_path / "first.py").write_text("open('made', 'w')")
    (tmp_path / "second.py").write_text("raise ValueError('data needs some_package: install it.')")
    template = Failing(name="x", about="", commands=(), sources=())
    with pytest.raises(ValueError) as caught:
        prepare(template, tmp_path, overwrite=False)
    assert str(caught.value) == (
        "the files are written, but 'python second.py' failed: data needs some_package: install"
        " it. Mend that, then run: python second.py && rollpacker warmup third.yaml"
    )
    assert (tmp_path / "made").exists()
