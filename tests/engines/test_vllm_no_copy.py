"""An engine of vLLM without a copy of the model beside its own: it is compared with the trainer.

Needs vLLM: `make vllm`, then `make test-vllm`."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rollpacker.engines.engine import EngineConfig, EngineError
from rollpacker.engines.vllm.engine import VllmEngine
from rollpacker.run.parts.engines import make_engine
from rollpacker.trainer.model import load_model
from rollpacker.trainer.trainer import ModelConfig
from rollpacker.weights.comparison import TEXT_TOKENS, text_of
from tests.engines.engines import write_model
from tests.engines.with_vllm import needs_vllm
from tests.test_weight_comparison import says, training

pytestmark = needs_vllm


def only_said(engine: VllmEngine) -> Callable[..., object]:
    """vLLM's `collective_rpc`, under which weights do not arrive, and are said to."""
    call, numbers = engine._vllm.collective_rpc, itertools.count()

    def answer(name: str, *arguments: Any, **named: Any) -> object:
        if name == "receive_weights":
            return [(f"weights {next(numbers)}", None)]
        return call(name, *arguments, **named)

    return answer


@pytest.mark.parametrize("stale_since", [None, 4])
def test_stale_weights_in_bfloat16_are_found_within_three_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stale_since: int | None
) -> None:
    """AdamW at 1e-6. A sound engine takes ten updates; a stale one is told that it has them."""
    config = ModelConfig(path=str(write_model(tmp_path)), device="cpu", dtype="bfloat16")
    settings = EngineConfig(name="vllm", kv_cache_gib=0.05)
    engine = make_engine(config=settings, model=dataclasses.asdict(config))
    assert isinstance(engine, VllmEngine)
    assert all(one.is_meta for one in engine._model.parameters())
    model = load_model(config).model
    update = training(model)
    text = text_of([range(model.config.vocab_size)], TEXT_TOKENS + 1)
    found = None
    try:
        for number in range(1, 11):
            update()
            if number == stale_since:
                monkeypatch.setattr(engine._vllm, "collective_rpc", only_said(engine))
            asyncio.run(engine.update_weights(number, dict(model.named_parameters())))
            engine.compare(text, says(model, torch.tensor([text])))
    except EngineError as error:
        assert "stayed as they were" in str(error)
        found = number
    finally:
        asyncio.run(engine.close())
    if stale_since is None:
        assert found is None
    else:
        assert found is not None and stale_since <= found < stale_since + 3
