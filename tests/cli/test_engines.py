"""What an engine's process is told, and what it makes of that; here in this process."""

from __future__ import annotations

import asyncio
import re

import pytest
import torch

from benchmarks.resume import write_model
from rollpacker.algo import AlgorithmConfig
from rollpacker.cli.engines import engine_setup, make_engine, one_device_each
from rollpacker.rollout.engine import EngineConfig
from rollpacker.rollout.messages import codec
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


def test_each_engine_has_a_device_of_its_own():
    def names(*arguments):
        return [one["CUDA_VISIBLE_DEVICES"] for one in one_device_each(*arguments)]

    assert names(2, 2, None) == ["0", "1"]
    assert names(2, 3, "5, 7,1") == ["5", "7"]
    with pytest.raises(ValueError, match=r"rollout.engines=2, but torch sees 1 CUDA device, and"):
        one_device_each(2, 1, None)
