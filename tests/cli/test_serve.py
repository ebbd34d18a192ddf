"""`rollpacker serve`: a model of the disk, asked by OpenAI's client; and what cannot be served."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollpacker.cli.main import main
from rollpacker.serving.sessions import read_recorded
from tests.dialogue.families import SEARCH
from tests.run.test_turns import save_model


def test_a_model_is_served_until_ctrl_c(tmp_path: Path) -> None:
    """The same seed draws the same words, and a dialogue goes on from what was drawn."""
    openai = pytest.importorskip("openai")
    model, record = tmp_path / "model", tmp_path / "kept"
    save_model(model)
    command = [sys.executable, "-m", "rollpacker.cli.main", "serve", str(model)]
    process = subprocess.Popen(
        [*command, "--port", "0", "--record", str(record)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    try:
        assert process.stdout is not None
        _, url, token = (process.stdout.readline().strip() for _ in range(3))
        client = openai.OpenAI(base_url=url.partition("=")[2], api_key=token.partition("=")[2])
        create = client.chat.completions.create
        question = {"role": "user", "content": "where?"}
        settings = {"model": "m", "seed": 3, "max_tokens": 8, "tools": [SEARCH], "user": "me"}
        first, again = (create(messages=[question], **settings) for _ in range(2))
        message = first.choices[0].message
        assert message.content == again.choices[0].message.content
        create(messages=[question, message, question], **settings)
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    recorded = read_recorded(record)
    assert sorted(len([*one.turns]) for _, one in recorded) == [1, 2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere"),
        (["model", "--port", "99999"], "--port 99999 is no port"),
        (["model", "--token", ""], "--token is empty"),
        (["model", "rollout.temperature=1"], "is a model without a config"),
        (["model", "--record", "kept"], "sessions.jsonl exists: record into another folder"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    save_model("model")
    Path("kept").mkdir()
    Path("kept/sessions.jsonl").touch()
    capsys.readouterr()
    assert main(["serve", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
