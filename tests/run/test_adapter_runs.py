"""Environments of other packages, each trained on for ten steps: the rows are the environment's
own, so that there is no data set. Those that are not installed are skipped."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollpacker.cli.main import main
from tests.run.test_turns import commands, entries, metrics, save_model, trained

TASKSETS = Path(__file__).parents[1] / "environments" / "adapters"
STEPS = 10
CASES: dict[str, dict[str, Any]] = {
    "gymnasium": {
        "function": "gymnasium:FrozenLake-v1",
        "arguments": {"is_slippery": False, "actions": ["left", "down", "right", "up"]},
    },
    "reasoning_gym": {
        "function": "reasoning-gym:chain_sum",
        "arguments": {"min_terms": 2, "max_terms": 2},
    },
    "gem": {"function": "gem:game:GuessTheNumber-v0-easy"},
    "verifiers": {"function": "verifiers:guess_taskset", "arguments": {"num_rows": 7}},
    "openenv": {"function": "openenv:", "arguments": {"action": "guess"}},
}


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    package: str = request.param
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if package != "openenv":
        yield CASES[package]
        return
    from tests.environments.adapters.guess_server import serving

    with serving() as url:
        yield {**CASES[package], "function": f"openenv:{url}"}


@pytest.mark.parametrize("case", CASES, indirect=True)
def test_ten_steps(
    case: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(TASKSETS))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TASKSETS), os.getenv("PYTHONPATH", "")]))
    save_model("model", max_positions=1024)  # gem's games explain themselves at length
    config = {
        "name": "talk",
        "model": {"path": "model"},
        "data": {"train": {"kind": "environment", "size": 7}, "max_prompt_tokens": 600},
        "environment": {**case, "max_turns": 3, "workers": 1},
        "rollout": {
            "prompts_per_step": 2,
            "samples_per_prompt": 2,
            "max_response_tokens": 8,
            "stop": ["a", "e", "i", "o", "t", "s"],
        },
        "rewards": [{"function": "environment"}],
        "train": {"steps": STEPS, "epochs": 10, "learning_rate": 1e-3},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    assert main(["train", "run.yaml"]) == 0
    found, rows = entries(tmp_path), metrics(tmp_path)
    assert len(rows) >= STEPS  # what is deferred is trained on at the end
    assert len(trained(found)) >= 2 * STEPS
    assert all(row["sampling/sampling_logp_difference/max"] < 1e-4 for row in rows)
    assert {one["sample"] for one in commands(found, "Conclude")} >= trained(found)
    if not case["function"].startswith("gem:"):  # which ends at words that are no answer
        assert max(row["episodes/turns/max"] for row in rows) > 1
