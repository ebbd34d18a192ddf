"""`rollpacker play`: an episode by hand and by a model, and what can be wrong."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from rollpacker.cli.main import main
from tests.run.test_turns import folder, model  # noqa: F401

pytestmark = pytest.mark.usefixtures("folder")
TOOLS = (
    'environment={tools: ["talk.py:look_up"]}',
    "rewards=[{function: talk.py:judge}]",
    "data.train.chat=true",
    "data.max_prompt_tokens=300",
    "rollout.max_response_tokens=100",
)


def typed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Standard input has this, and then ends."""
    end, other = os.pipe()
    os.write(other, text.encode())
    os.close(other)
    monkeypatch.setattr("sys.stdin", os.fdopen(end))


def play(*arguments: str) -> int:
    return main(["play", "run.yaml", *arguments])


def test_by_hand_every_message_is_drawn_and_what_is_answered_is_given(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "ab\ncd\\\nef\n\ufffd\x1b[2Jx\nfour\n")
    assert play("--prompt", "3") == 0
    told = capsys.readouterr().out
    lines = told.splitlines()
    assert "> ab<|im_end|>" in lines
    assert lines[lines.index("> cd") + 1] == "> ef<|im_end|>"
    assert "  Question 3.<|im_end|>" in lines
    assert "  2 letters. And then?<|im_end|>" in lines
    assert "\x1b" not in told
    assert any(line.startswith("- ended: done") for line in lines)
    assert "- reward, weighted: " in told
    assert not Path("runs").exists()


def test_a_call_typed_as_json_is_put_into_the_models_format(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, '{"name": "look_up", "arguments": {"word": "ab"}}\nI see.\n')
    assert play(*TOOLS) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "> <tool_call>" in lines
    assert '- calls look_up {"word": "ab"}' in lines
    assert any("abab" in line and not line.startswith(">") for line in lines)
    assert "- reward judge: 3" in lines  # the call, its result, the last message


def test_a_call_that_the_template_refuses_is_told_and_asked_for_again(
    folder: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(json.loads((folder / "run.yaml").read_text())["model"]["path"], "model")
    template = folder / "model" / "chat_template.jinja"
    two = "{% if messages[-1].tool_calls and messages[-1].tool_calls | length > 1 %}"
    refused = "{{ raise_exception('one call\x1b[2J at a time') }}{% endif %}"
    template.write_text(two + refused + template.read_text())
    call = '{"name": "look_up", "arguments": {"word": "ab"}}'
    typed(monkeypatch, f"[{call}, {call}]\n{call}\nI see.\n")
    assert play(*TOOLS, "model.path=model") == 0
    told = capsys.readouterr().out
    assert "- this is no call that the model could make: " in told
    assert "one call\\x1b[2J at a time" in told and "\x1b" not in told
    assert told.count('- calls look_up {"word": "ab"}') == 1
    assert "- reward judge: 3" in told.splitlines()


def test_the_input_ends_before_the_episode(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "ab\n")
    assert play() == 0
    told = capsys.readouterr().out
    assert "- stopped before its end: there is nothing to judge" in told
    assert "weighted" not in told


def test_a_model_plays_and_each_token_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert play("--model", "--tokens", "--prompt", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    tokens = [line.split() for line in lines if line[:1] in "> " and line.strip()]
    drawn = [one for one in tokens if one[0] == ">"]
    places = [int(one[1] if one[0] == ">" else one[0]) for one in tokens]
    assert places == [*range(len(tokens))]
    assert drawn and all(float(one[3]) <= 0.0 for one in drawn)
    (told,) = [line for line in lines if " tokens drawn, " in line]
    assert f", {len(drawn)} tokens drawn" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("environment=null", "rewards=[{function: talk.py:judge}]"), "has no environment"),
        (("--prompt", "16"), "data.train has 16 prompts, 0 to 15"),
        (("--prompt", "-1"), "there is no prompt -1"),
        (("--model", "nowhere"), "there is no run or model at nowhere"),
        (("--model", "."), "is no model's folder"),
        (("environment.function=talk.py:RaisesAtReset", "--prompt", "1"), "nobody is there"),
    ],
)
def test_one_message_for_what_cannot_be_played(
    arguments: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    typed(monkeypatch, "ab\n")
    assert play(*arguments) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("rollpacker:")]
    assert len(said) == 1 and message in said[0]
