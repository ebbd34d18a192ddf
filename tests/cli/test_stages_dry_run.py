"""What --dry-run says of pipeline stages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_bad_input import Command, command, model

__all__ = ["command", "model"]


@pytest.fixture
def layers(command: Command) -> Command:
    """A model of three layers, of which nothing but its config is here."""
    folder = Path(command.settings["model"]["path"])
    config = json.loads((folder / "config.json").read_text())
    three = {"num_hidden_layers": 3, "layer_types": 3 * config["layer_types"]}
    (command.folder / "three").mkdir()
    (command.folder / "three" / "config.json").write_text(json.dumps(config | three))
    command.settings["model"] = {"path": str(command.folder / "three"), "device": "cpu"}
    command.settings["train"]["processes"] = 4
    return command


def test_the_dry_run_has_a_part_for_each_stage_and_the_bubble(layers: Command) -> None:
    assert layers.train("--dry-run", train__pipeline={"stages": 2, "layers": [2, 1]}) == 0
    lines = [line.strip() for line in layers.out.splitlines()]
    (first,) = [line for line in lines if line.startswith("stage 0")]
    (last,) = [line for line in lines if line.startswith("stage 1")]
    assert "2 layers, at most" in first and "in each of its 2 processes" in first
    assert "1 layer, at most" in last
    assert any(line.startswith("gathered") for line in lines)
    assert any("trainer's process 3 (stage 1)" in line for line in lines)
    (bubble,) = [line for line in lines if line.startswith("bubble")]
    assert "% of the stages' time, in sweeps of at most 1 micro-batch (" in bubble
    (note,) = [line for line in lines if "for 2 pipeline stages, which idle" in line]
    share = next(word for word in bubble.split() if word.isdigit())
    assert f"which idle for {share} %" in note
