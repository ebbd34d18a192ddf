"""The rewards that the README and the configs point to."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rollpacker.config.load import load_config
from rollpacker.config.schema import RunConfig
from rollpacker.data.prompts import load_prompts
from rollpacker.rewards.build import build_reward
from rollpacker.rewards.reward import RewardInput, Scored
from rollpacker.rewards.weighted import WeightedReward
from tests.data.characters import character_tokenizer

ROOT = Path(__file__).parents[2]


def reward_of(config: str, monkeypatch: pytest.MonkeyPatch) -> tuple[RunConfig, WeightedReward]:
    monkeypatch.chdir(ROOT)
    loaded = load_config(ROOT / "configs" / config, [], RunConfig)
    return loaded, build_reward(loaded.rewards)


def value(reward: WeightedReward, completion: str, prompt: Any, columns: dict[str, Any]) -> Any:
    sample = RewardInput(
        prompt=prompt,
        completion=completion,
        completion_tokens=(),
        finish_reason="stop",
        columns=columns,
    )
    (verdict,) = asyncio.run(reward.score([sample]))
    assert isinstance(verdict, Scored), verdict
    return verdict.value


def test_gsm8k(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config, reward = reward_of("gsm8k-1.5b.yaml", monkeypatch)
    row = {"question": "How many?", "answer": "He has 1,000 + 234.\n#### 1,234"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    local = load_config(
        ROOT / "configs" / "gsm8k-1.5b.yaml",
        [f"data.train.path={tmp_path}/rows.jsonl", "data.train.kind=jsonl", "data.eval=null"],
        RunConfig,
    )
    prompts, _ = load_prompts(local.data, character_tokenizer())
    (made,) = prompts.rows
    reward.check([(None, made.columns)])
    for completion, expected in [
        ("It is 1234.\n#### 1234", 1.0),
        ("#### $1,234.00", 1.0),
        ("#### 7\n#### 1234", 1.0),
        ("1234", 0.0),
        ("#### none", 0.0),
        ("#### 1235", 0.0),
    ]:
        assert value(reward, completion, made.prompt, dict(made.columns)) == expected
    assert config.data.eval is not None
    assert config.data.eval.system_prompt == config.data.train.system_prompt


def test_own_data(monkeypatch: pytest.MonkeyPatch) -> None:
    config, reward = reward_of("own-data.yaml", monkeypatch)
    prompts, held_out = load_prompts(config.data, character_tokenizer())
    assert held_out is not None
    assert len(prompts.rows) + len(held_out.rows) == 32
    assert len(prompts.rows) >= config.rollout.prompts_per_step * 1.25
    for row in prompts.rows:
        reward.check([(None, row.columns)])
        city = row.columns["answer"]
        assert value(reward, city, row.prompt, dict(row.columns)) > 1.0
        assert value(reward, "I do not know", row.prompt, dict(row.columns)) == 0.05
