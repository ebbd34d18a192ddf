"""Order-only tail batching asked for what cannot be, and resumed with what is not there: one
message that says what to do, no traceback, nothing changed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from rollpacker.engines.table import ENGINES
from rollpacker.run import session
from rollpacker.run.folder import checkpoint as checkpoints
from tests.cli.test_bad_input import Command, command, model

__all__ = ["command", "model"]

POOL: dict[str, Any] = {
    "tail_batching": {"prompt_factor": 1.5},
    "rollout__max_response_tokens": 40,
    "checkpoint__keep_last": 1,
}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "tail_batching.sample_factor=1.25",
            "must be 1 with selection=none, which throws no response",
        ),
        ("tail_batching.tiers=[{sample_factor: 2.0}]", "set selection=published"),
        ("tail_batching.carry=weighted", "set algorithm.mismatch_correction=token-truncate"),
        ("rollout.engine.name=echo", "which rollout.engine.name=echo does not: set tail_batching."),
    ],
)
def test_settings_that_do_not_go_together(
    command: Command, monkeypatch: pytest.MonkeyPatch, override: str, message: str
) -> None:
    monkeypatch.setitem(ENGINES, "echo", "tests.drills.echo_engine:EchoEngine")
    config = command.config(tail_batching={})
    for option in ((), ("--dry-run",)):
        assert command("train", config, override, *option) == 2
        assert message in command.err and command.err.count("\n") == 1
    assert not command.run.parent.exists()


def carried(command: Command) -> Path:
    """A run that ended while something waited: its only checkpoint's carried tokens."""
    run = checkpoints.write_checkpoint
    folder = command.run / "checkpoints"
    killed_at = 2

    def write(root: Path, step: int, *rest: Any, **named: Any) -> Path:
        if step > killed_at:
            raise OSError(28, "No space left on device")
        return run(root, step, *rest, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rollpacker.run.ports.commits.write_checkpoint", write)
        assert command.train(**POOL, train__steps=5) != 0
    assert command.kept() == ["step_000002"]
    found = folder / "step_000002" / "carried"
    assert (found / "tokens.npy").is_file()
    return found


def without(command: Command) -> None:
    """The cure that the messages name."""
    tail = {**POOL["tail_batching"], "carry": "none"}
    assert command.train("--resume", **{**POOL, "tail_batching": tail}, train__steps=5) == 0
    assert command.steps() >= 5


def test_another_tokenizer(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    carried(command)
    before = (command.run / "config.yaml").read_text()
    with monkeypatch.context() as patch:
        patch.setattr(session, "tokenizer_fingerprint", lambda policy: "another")
        message = command.refused("--resume", **POOL, train__steps=6)
        assert "step_000002/carried" in message and "of another tokenizer" in message
        assert "tail_batching.carry=none" in message
        assert (command.run / "config.yaml").read_text() == before
        without(command)


@pytest.mark.parametrize("name", ["tokens.npy", "log_probs.npy", "carried.json"])
def test_a_file_that_is_missing(command: Command, name: str) -> None:
    (carried(command) / name).unlink()
    message = command.refused("--resume", **POOL, train__steps=5)
    assert f"step_000002: carried/{name} is missing" in message
    assert "tail_batching.carry=none resumes without carried/" in message
    without(command)


def test_tokens_that_are_not_those_of_the_job(command: Command) -> None:
    """The manifest vouches for them, so it is ours to see that they cannot be meant."""
    index = carried(command) / "carried.json"
    plain = json.loads(index.read_text())
    [first, *rest] = plain["samples"]
    plain["samples"] = [[first[0], first[1] + 7, *first[2:]], *rest]
    index.write_text(json.dumps(plain))
    manifest_path = index.parents[1] / "manifest.json"
    manifest = json.loads(manifest_path.read_text())
    text = index.read_bytes()
    sound = {"size": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    manifest["files"]["carried/carried.json"] = sound
    manifest_path.write_text(json.dumps(manifest))
    message = command.refused("--resume", **POOL, train__steps=5)
    assert (
        f"tokens of response {first[1]} to {first[0]}, of which the run had {first[2]}" in message
    )
    assert "tail_batching.carry=none" in message
    without(command)
