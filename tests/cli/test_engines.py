"""What an engine's process is told, and what it makes of that; here in this process."""

from __future__ import annotations

import asyncio
import re

import pytest
import torch
from transformers import Qwen2Config

from benchmarks.resume import write_model
from rollpacker.algo import AlgorithmConfig
from rollpacker.core.fleet.parallelism import ParallelismConfig
from rollpacker.engines.engine import EngineConfig
from rollpacker.engines.messages import codec
from rollpacker.run.parts.engines import check_heads, engine_setup, make_engine
from rollpacker.trainer.setup import LearnerSetup, build_learner
from rollpacker.trainer.torch_trainer import TorchTrainer
from rollpacker.trainer.trainer import LoraConfig, ModelConfig, TrainConfig


def made(model: ModelConfig, **config: object):
    setup = engine_setup(model, EngineConfig(**config), threads=1)
    setup = codec().decode(codec().encode(setup))
    module, name = setup.make.split(":")
    assert (module, name) == (make_engine.__module__, make_engine.__name__)
    return make_engine(config=setup.config, **setup.arguments)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2, target_modules=("q_proj", "v_proj"))])
def test_it_takes_the_weights_that_the_trainer_writes(tmp_path, lora):
    write_model(tmp_path)
    model = ModelConfig(path=str(tmp_path), device="cpu", lora=lora)
    engine = made(model, max_slots=3)
    setup = LearnerSetup(
        model=model,
        train=TrainConfig(steps=2),
        algorithm=AlgorithmConfig(),
        temperature=1.0,
        total_steps=2,
    )
    trainer = TorchTrainer(build_learner(setup), in_place=False, shared=True)
    with torch.no_grad():
        for _, value in trainer.learner.weights():
            value.add_(0.1)

    async def hand_over() -> None:
        new = await trainer.hand_over()
        assert engine.weight_probe() != new.probe
        await engine.update_weights(0, new.weights)
        assert engine.weight_probe() == new.probe
        await engine.close()

    asyncio.run(hand_over())
    trainer.close()


def test_a_model_that_is_not_there_is_the_users_to_mend(tmp_path):
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path}: no config.json")):
        made(ModelConfig(path=str(tmp_path)))


@pytest.mark.parametrize(
    ("degrees", "fits"),
    [((1, 2), True), ((1, 4), True), ((1, 3), False), ((1, 8), False)],
)
def test_a_degree_that_does_not_divide_the_heads_is_refused(degrees, fits):
    """Of 4 heads, and 2 of keys and values, which may be kept twice."""
    model = Qwen2Config(hidden_size=32, num_attention_heads=4, num_key_value_heads=2)
    planner = ParallelismConfig(enabled=True, degrees=degrees)
    if fits:
        check_heads(model, planner)
        return
    with pytest.raises(ValueError, match=rf"{degrees[1]} devices cannot share .* 4 attention hea"):
        check_heads(model, planner)
    check_heads(model, ParallelismConfig(degrees=degrees))  # which nobody chooses from
