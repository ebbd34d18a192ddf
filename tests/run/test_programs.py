"""Runs whose environment is a program that was written for anybody's OpenAI endpoint."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rollpacker.cli.main import main
from rollpacker.cli.serve import _target
from rollpacker.engines.engine import Response
from rollpacker.run.ports.player import Play
from tests.dialogue.families import tokenizer_of
from tests.run.test_turns import save_model

AGENT = Path(__file__).parents[1] / "environments" / "programs" / "search_agent.py"

pytest.importorskip("openai")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    save_model("model", max_positions=1024)
    rows = [{"prompt": f"Row {n}", "question": f"Where is town {n}?"} for n in range(16)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "name": "agent",
        "model": {"path": "model"},
        "data": {"train": {"kind": "jsonl", "path": "rows.jsonl"}, "max_prompt_tokens": 400},
        "environment": {"function": f"program:{sys.executable} {AGENT}", "workers": 1},
        "rollout": {
            "prompts_per_step": 2,
            "samples_per_prompt": 2,
            "max_response_tokens": 24,
            "stop": ["a", "e", "i", "o", "t", "s"],
        },
        "rewards": [{"function": "environment"}],
        "train": {"steps": 2, "learning_rate": 1e-3},
        "tail_batching": {"enabled": False},
    }
    Path("run.yaml").write_text(json.dumps(config))
    return tmp_path


def entries() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("runs/agent/events.jsonl").read_text().splitlines()]


def test_a_program_for_another_endpoint_trains_unchanged(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tools stand in the prompt, its rewards arrive, and what the trainer says of the drawn
    tokens is what the engine said of them."""
    responses: list[Response] = []
    whole = Play.response

    def kept(self: Play, reason: str) -> Response:
        responses.append(whole(self, reason))
        return responses[-1]

    monkeypatch.setattr(Play, "response", kept)
    assert main(["train", "run.yaml"]) == 0
    lines = Path("runs/agent/metrics.jsonl").read_text().splitlines()
    steps = [row for line in lines if "train/response_tokens" in (row := json.loads(line))]
    assert len(steps) == 2
    for step in steps:
        assert step["sampling/sampling_logp_difference/max"] < 1e-4
        assert step["episodes/turns/max"] > 1
    acted = [one for one in entries() if one.get("event") == "Acted"]
    assert acted and not [one for one in acted if one["cause"]]
    served = _target(argparse.Namespace(target="runs/agent", overrides=["rollout.top_k=3"]))
    assert served.model.path == "runs/agent/checkpoints/step_000002/model"
    assert (served.sampling.top_k, served.sampling.max_response_tokens) == (3, 24)
    decode = tokenizer_of("chatml").decode
    prompts = [decode(list(one.prompt_tokens)) for one in responses]
    assert len(prompts) == 8
    for prompt, one in zip(prompts, responses, strict=True):
        assert '"name": "search"' in prompt and "Where is town" in prompt
        for first, last in one.given:
            assert "letters. And then?" in decode(list(one.tokens[first:last]))


def test_one_that_fails_is_no_zero(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    Path("agent.py").write_text(
        f"import json, os, sys\nsys.path.insert(0, {str(AGENT.parent)!r})\n"
        "from search_agent import run_agent\n"
        "row = json.loads(os.environ['ROLLPACKER_ROW'])\n"
        "reward = run_agent(row['question'])\n"
        "if row['seed'] % 3 == 0: raise OSError('nobody is there')\n"
        "print(json.dumps({'reward': reward}))\n"
    )
    assert main(["train", "run.yaml", "environment.function=program:python agent.py"]) == 0
    found = entries()
    acted = [one for one in found if one.get("event") == "Acted" and one["cause"]]
    failed = {one["sample"] for one in acted}
    assert failed and {one["cause"] for one in acted} == {"environment"}
    assert all("OSError: nobody is there" in one["reason"] for one in acted)
    assert not failed & {one["sample"] for one in found if one.get("event") == "SampleScored"}
