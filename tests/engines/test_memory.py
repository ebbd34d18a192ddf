"""An engine's process has the model once: weights come from files, then from shared memory."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from rollpacker.engines.engine import EngineConfig
from rollpacker.trainer.model import new_model, write_character_tokenizer
from rollpacker.weights.buffer import WeightBuffer
from tests.engines.engines import ALPHABET, in_process, serve
from tests.engines.tiny import request
from tests.engines.with_vllm import needs_vllm
from tests.memory import Watch

SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4}
CACHE_GIB = {"torch": None, "vllm": 0.05}


def peak_of(name: str, folder: Path, sizes: dict[str, int]) -> tuple[int, int]:
    """Bytes of the process of an engine at its peak, from its start to after an update and a
    response; and of the model in float32. Its files are in half precision."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    architecture: dict[str, Any] = {"model_type": "qwen3", "max_position_embeddings": 64}
    folder.mkdir()
    tokenizer = write_character_tokenizer(ALPHABET, folder)
    model = new_model(architecture | heads | sizes, tokenizer, 0)
    buffer = WeightBuffer.create(model.named_parameters())
    with buffer.writing(1) as tensors, torch.no_grad():
        for key, value in model.named_parameters():
            tensors[key].copy_(value)
    num_bytes = 4 * sum(one.numel() for one in model.parameters())
    model.bfloat16().save_pretrained(folder)
    engine = in_process(folder, EngineConfig(name=name, max_slots=1, kv_cache_gib=CACHE_GIB[name]))
    with Watch(engine.child.pid) as watch:
        asyncio.run(engine.ready())
        asyncio.run(engine.update_weights(1, buffer.layout.source(1)))
        serve(engine, [request(0)])
    asyncio.run(engine.close())
    return watch.peak_bytes, num_bytes


@pytest.mark.parametrize(
    "name, most", [("torch", 1.3), pytest.param("vllm", 1.75, marks=needs_vllm)]
)
def test_the_model_is_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, most: float
) -> None:
    """vLLM keeps up to half a model besides while it reads weights and packs them."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # what is freed goes back at once
    without, _ = peak_of(name, tmp_path / "small", SMALL)
    peak, model = peak_of(name, tmp_path / "large", LARGE)
    assert model > 200e6
    assert 0.9 * model < peak - without < most * model
