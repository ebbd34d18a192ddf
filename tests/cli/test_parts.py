"""What a run is put together from."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.resume import ALPHABET, write_config, write_model
from rollpacker.config.load import load_config
from rollpacker.config.schema import RolloutConfig, RunConfig
from rollpacker.data.dataset import DataConfig, DatasetConfig
from rollpacker.engines.embedded.attention import UnsupportedModelError
from rollpacker.rewards.reward import RewardConfig
from rollpacker.run.parts.policy import load_policy
from rollpacker.run.parts.trainer import build_trainer
from rollpacker.trainer.model import load_model, write_character_tokenizer
from rollpacker.trainer.trainer import CriticConfig, ModelConfig, TrainConfig
from tests.trainer.hybrids import hybrid_model


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


def test_a_hybrid_is_for_an_engine_that_brings_its_own_model(tmp_path: Path) -> None:
    tokenizer = write_character_tokenizer(ALPHABET, tmp_path / "model")
    hybrid_model(vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    path = write_config(tmp_path, steps=1)
    config = load_config(path, ["rollout.engine.name=vllm"], RunConfig)
    policy = load_policy(config)  # its engine is made when it is asked for
    assert policy.loaded.model.config._attn_implementation == "sdpa"
    trainer = build_trainer(config, policy, None)
    trainer.close()
    says = "Qwen3_5ForCausalLM has layers of type linear_attention.* rollout.engine.name=vllm"
    with pytest.raises(UnsupportedModelError, match=says):
        load_policy(load_config(path, [], RunConfig))
    packed = dataclasses.replace(config.train, micro_batches="packed")
    with pytest.raises(ValueError, match=r"train.micro_batches=packed is not possible"):
        build_trainer(dataclasses.replace(config, train=packed), policy, None)
