"""What a configuration says of engines, and what the core is told of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollpacker.config.running import DeadlineConfig
from rollpacker.config.schema import RolloutConfig
from rollpacker.core.fleet.fleet import FleetConfig
from rollpacker.core.rounds.tail_batching import TailBatchingConfig
from rollpacker.engines.engine import EngineConfig
from rollpacker.engines.messages import codec
from rollpacker.run.parts.engines import engine_setup
from rollpacker.trainer.trainer import LoraConfig, ModelConfig
from tests.run.fakes import run_config


def rollout(**settings: object) -> RolloutConfig:
    return replace(run_config().rollout, **settings)


def test_one_engine_is_what_the_core_knows_nothing_of() -> None:
    job = run_config().job()
    assert job.fleet is None and "fleet" not in job.to_plain()


def test_several_are_told_with_their_routing() -> None:
    config = replace(run_config(), rollout=rollout(engines=3, routing="group"))
    assert config.job().fleet == FleetConfig(num_engines=3, routing="group", moves=True)


def test_slots_are_those_of_all_engines() -> None:
    assert rollout(engines=3).max_slots is None
    assert rollout(engines=3, engine=EngineConfig(max_slots=5)).max_slots == 15


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="engines must be at least 1, not 0"):
        rollout(engines=0)
    with pytest.raises(ValueError, match="heartbeat_s must be more than 0"):
        DeadlineConfig(heartbeat_s=0)
    model = ModelConfig(path="x", quantization="4bit", lora=LoraConfig())
    with pytest.raises(ValueError, match=r"engines=2 does not go with model.quantization=4bit"):
        replace(run_config(), model=model, rollout=rollout(engines=2))


def test_vllms_own_arguments_are_kept_and_ours_refused() -> None:
    given = {"quantization": "fp8", "swap": [1]}
    setup = engine_setup(ModelConfig(path="x"), EngineConfig(name="vllm", vllm=given), threads=1)
    assert codec().decode(codec().encode(setup)).config.vllm == given
    for argument, cure in (("dtype", "model.dtype"), ("max_num_seqs", "rollout.engine.max_slots")):
        with pytest.raises(ValueError, match=f"vllm.{argument} follows from {cure}: leave it out"):
            EngineConfig(name="vllm", vllm={argument: 1})
    with pytest.raises(ValueError, match=r"vllm has arguments for vLLM, and name is torch"):
        EngineConfig(vllm=given)


def test_batch_invariant_kernels_are_vllms_and_left_to_runs_that_carry_exactly() -> None:
    with pytest.raises(ValueError, match=r"batch_invariant=true asks for kernels of vLLM"):
        EngineConfig(batch_invariant=True)
    for tail, expected in (
        (TailBatchingConfig(), "auto"),
        (TailBatchingConfig(carry="none"), False),
        (TailBatchingConfig(enabled=False), False),
    ):
        assert replace(run_config(), tail_batching=tail).engine.batch_invariant == expected
    asked = rollout(engine=EngineConfig(name="vllm", batch_invariant=True))
    without = TailBatchingConfig(enabled=False)
    config = replace(run_config(), rollout=asked, tail_batching=without)
    assert config.engine.batch_invariant is True
