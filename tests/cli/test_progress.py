"""What is shown while something long is done before a run."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from rollpacker.config.load import load_config
from rollpacker.config.schema import RunConfig
from rollpacker.report import table
from rollpacker.run import output
from rollpacker.run.parts.policy import load_inputs
from tests.cli.test_prompts_shown import config, instruct  # noqa: F401  # fixtures


def shown(monkeypatch: pytest.MonkeyPatch, *, terminal: bool, every_s: float) -> str:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=100)
    monkeypatch.setattr(output, "console", lambda **_: console)
    monkeypatch.setattr(output, "LINE_EVERY_S", every_s)
    with output.progress("reward [red]code: reference solutions checked", 2000) as tell:
        tell(1)
        tell(1000)
    return text.getvalue()


def test_without_a_terminal_it_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "reward [red]code: reference solutions checked: {} of 2,000\n"
    lines = line.format("1") + line.format("1,000")
    assert shown(monkeypatch, terminal=False, every_s=0) == lines
    assert shown(monkeypatch, terminal=False, every_s=60) == ""


def test_on_a_terminal_it_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, terminal=True, every_s=60)
    assert "reward [red]code: reference solutions checked" in text and "1000/2000" in text


def test_forced_colours_make_no_terminal_of_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    for stderr in (False, True):
        console = output.console(stderr=stderr)
        console.print("[red]some[/] 1", markup=True)
        assert not console.is_terminal
    assert capsys.readouterr() == ("some 1\n", "some 1\n")


def test_consoles_are_made_in_one_place() -> None:
    package = Path(output.__file__).parents[1]
    made = [path for path in package.rglob("*.py") if re.search(r"\bConsole\(", path.read_text())]
    # The console of tables writes a text, and the one here writes to the terminal.
    assert sorted(made) == sorted([Path(output.__file__), Path(table.__file__)])


def test_rewards_are_given_it(config: Path) -> None:  # noqa: F811
    loaded = load_inputs(load_config(str(config), (), RunConfig), progress=output.progress)
    assert loaded.reward.shared.progress is output.progress
