"""Adapters of an engine of vLLM in a process of its own, and on two devices.

Needs vLLM: `make vllm`, then `make test-vllm`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from rollpacker.engines.engine import EngineConfig
from rollpacker.engines.process_engine import ProcessEngine
from rollpacker.run.parts.engines import engine_setup
from rollpacker.trainer.lora import adapter_parameters, add_adapter
from rollpacker.trainer.model import load_model
from rollpacker.trainer.trainer import LoraConfig, ModelConfig
from rollpacker.weights.buffer import WeightBuffer
from tests.engines.engines import serve, write_model
from tests.engines.test_vllm_adapters import ALL, REQUESTS, check, trained
from tests.engines.with_vllm import needs_vllm

pytestmark = needs_vllm


@pytest.mark.parametrize("devices", [1, 2])
def test_in_a_process_of_its_own_adapters_come_through_shared_memory(
    tmp_path: Path, devices: int
) -> None:
    folder, lora = write_model(tmp_path), LoraConfig(rank=4, target_modules=ALL)
    config = ModelConfig(path=str(folder), device="cpu", dtype="float32", lora=lora)
    settings = EngineConfig(name="vllm", kv_cache_gib=0.05)
    setup = engine_setup(config, settings, threads=devices, tensor_parallel=devices)
    engine = ProcessEngine(setup)
    asyncio.run(engine.ready())
    model = add_adapter(load_model(config).model, lora)
    buffer = WeightBuffer.create(adapter_parameters(model).items())
    try:
        for version in (1, 2):
            weights = trained(model, version)
            with torch.no_grad(), buffer.writing(version) as tensors:
                for name, value in adapter_parameters(model).items():
                    tensors[name].copy_(weights[name])
                    value.copy_(weights[name])
            asyncio.run(engine.update_weights(version, buffer.layout.source(version)))
            outputs = serve(engine, REQUESTS)
            check(model, [outputs[one.sample].response for one in REQUESTS])
    finally:
        asyncio.run(engine.close())
