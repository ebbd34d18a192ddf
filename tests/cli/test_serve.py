"""`rollpacker serve`: a model of the disk, asked by OpenAI's client; and what cannot be served."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rollpacker.cli.main import main
from rollpacker.serving.sessions import read_recorded
from tests.dialogue.families import SEARCH, tokenizer_of


def write_model(folder: Path) -> Path:
    tokenizer = tokenizer_of("chatml")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def test_a_model_is_served_until_ctrl_c(tmp_path: Path) -> None:
    """The same seed draws the same words, and a dialogue goes on from what was drawn."""
    openai = pytest.importorskip("openai")
    model, record = write_model(tmp_path / "model"), tmp_path / "kept"
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
    write_model(Path("model"))
    Path("kept").mkdir()
    Path("kept/sessions.jsonl").touch()
    capsys.readouterr()
    assert main(["serve", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
