"""What a run is put together from."""

from __future__ import annotations

from types import SimpleNamespace

from benchmarks.resume import write_model
from rollpacker.cli.parts import build_trainer
from rollpacker.config.schema import RolloutConfig, RunConfig
from rollpacker.data.dataset import DataConfig, DatasetConfig
from rollpacker.rewards.reward import RewardConfig
from rollpacker.trainer.model import load_model
from rollpacker.trainer.trainer import CriticConfig, ModelConfig, TrainConfig


def test_a_critic_that_nobody_asks_is_said(tmp_path, caplog):
    write_model(tmp_path)
    config = RunConfig(
        name="critic",
        model=ModelConfig(path=str(tmp_path), device="cpu"),
        data=DataConfig(train=DatasetConfig(kind="jsonl", path="none")),
        rollout=RolloutConfig(prompts_per_step=1, samples_per_prompt=2, max_response_tokens=40),
        train=TrainConfig(steps=2, critic=CriticConfig(path="some/critic")),
        rewards=(RewardConfig(function="none:none"),),
    )
    policy = SimpleNamespace(loaded=load_model(config.model), threads=1)
    build_trainer(config, policy, None).close()
    assert caplog.text.count("train.critic.path is set and does nothing") == 1
